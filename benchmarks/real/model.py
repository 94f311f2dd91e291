"""SmolLM2-135M-Instruct with chat prompts, and a draft that nothing was trained for: its own first layers.

Prompts are questions of a file given by path (GSM8K), or else of the one-sentence task.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from benchmarks.support.workload import BENCH_SEED, Workload, default_cache_dir, job
from rlhfspec.core.config import DataConfig, SamplingConfig
from rlhfspec.core.errors import ModelError
from rlhfspec.core.files import whole_folder
from rlhfspec.engine.weights.loading import load_causal_lm, load_tokenizer
from rlhfspec.learning.data.prompts import load_prompts, sampling_params
from rlhfspec.learning.models.get import get_model
from rlhfspec.learning.models.make import PairPaths

NAME = "smollm2-135m-instruct"
DRAFT_LAYERS = 4
"Of 30: with the vocabulary's matrix a third of a target forward."


def real_workload(
    num_prompts: int, *, data: Path | None, max_new_tokens: int, console: Console
) -> Workload | None:
    """Return the model with its prompts; None, having said why, when the model cannot be had."""
    try:
        with job(f"getting {NAME}") as tick:
            target = get_model(NAME, default_cache_dir(), progress=tick).path
    except ModelError as error:
        console.print(f"skipped: {error}", markup=False)
        return None
    tokenizer = load_tokenizer(str(target))
    if data is None:
        console.print("no --data given: questions of the one-sentence task instead of GSM8K's")
        config = DataConfig(task="one_sentence", chat=True, limit=num_prompts)
    else:
        config = DataConfig(path=str(data), chat=True, limit=num_prompts)
    dataset = load_prompts(config, tokenizer, seed=BENCH_SEED)
    return Workload(
        name="smollm2",
        paths=PairPaths(target=target, draft=_first_layers(target)),
        tokenizer=tokenizer,
        prompts=dataset.prompts[:num_prompts],
        sampling=sampling_params(SamplingConfig(max_new_tokens=max_new_tokens), tokenizer),
    )


def _first_layers(target: Path) -> Path:
    """The target cut behind its first layers, made once and kept in the cache."""
    folder = default_cache_dir() / f"bench-{NAME}-first-{DRAFT_LAYERS}"
    if not (folder / "config.json").is_file():
        model = load_causal_lm(str(target), "float32")
        model.base_model.layers = model.base_model.layers[:DRAFT_LAYERS]  # type: ignore[union-attr,index]
        model.config.num_hidden_layers = DRAFT_LAYERS
        with whole_folder(folder) as partial:
            model.save_pretrained(partial)
            load_tokenizer(str(target)).save_pretrained(partial)
    return folder
