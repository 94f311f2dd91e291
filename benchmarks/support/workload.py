"""What the benchmarks decode: a model pair with prompts of its own task, and model P.

`demo` is the embedded pair on its chain task; `gsm8k` a pair made from a question/answer file given by path, on
questions of that file; `real` SmolLM2-135M-Instruct with chat prompts. Pairs are made once and cached. Model P is the
random Llama on which engines are compared: 8 layers, hidden 512, 8 heads over 4 KV heads, inner size 1536, vocabulary
4096: 29.4M parameters. Random weights decode at the speed of trained ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...core.config import DataConfig, EngineConfig, RunConfig, SamplingConfig, SpeculationConfig
from ...core.errors import ModelError
from ...core.files import whole_folder
from ...core.records import (
    Completion,
    Prompt,
    Reward,
    Rollout,
    SampleKey,
    SampleRequest,
    SamplingParams,
    Stream,
)
from ...engine.build import build_engine
from ...engine.calibration.engine_provenance import provenance_of
from ...engine.calibration.profiler import MadeProfile, make_profile
from ...engine.drafters.head.head_weights import HeadWeights
from ...engine.engine import Engine
from ...engine.group.dealing import dealt
from ...engine.group.ranks import GroupRanks
from ...engine.weights.loading import load_causal_lm, load_tokenizer, num_token_ids
from ...learning.data.prompts import load_prompts, sampling_params
from ...learning.models.get import get_model
from ...learning.models.make import PairPaths, make_demo_pair, make_pair_from_text

BENCH_SEED = 7
PROFILE_INDEX = 100_000
"Sample indices from here on are of profiles: they are fitted on other samples than those that are measured."
PLAIN = SpeculationConfig(policy="off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A pair, its tokenizer, and prompts."""

    name: str
    paths: PairPaths
    known_tokenizer: PreTrainedTokenizerBase | None
    "None: prompts are random ids of VOCAB_SIZE"
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    "T = 1, unfiltered, with the task's limit and stop tokens"

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Of a pair that reads text."""
        assert self.known_tokenizer is not None
        return self.known_tokenizer

    @property
    def vocab_size(self) -> int:
        """Token ids the tokenizer knows."""
        return VOCAB_SIZE if self.known_tokenizer is None else num_token_ids(self.known_tokenizer)

    @property
    def pad_token_id(self) -> int:
        """The padding token, the first stop token where there is none."""
        if self.known_tokenizer is None:
            return 0
        pad = self.known_tokenizer.pad_token_id
        return pad if isinstance(pad, int) else self.sampling.stop_token_ids[0]

    @property
    def max_total_tokens(self) -> int:
        """Longest prompt and longest response."""
        longest = max(len(prompt.token_ids) for prompt in self.prompts)
        return longest + self.sampling.max_new_tokens

    def target(self, dtype: str) -> PreTrainedModel:
        """Load a fresh target model."""
        return load_causal_lm(str(self.paths.target), dtype)

    def draft(self, dtype: str) -> PreTrainedModel:
        """Load a fresh draft model."""
        return load_causal_lm(str(self.paths.draft), dtype)

    def engine(
        self,
        speculation: SpeculationConfig = PLAIN,
        draft: PreTrainedModel | HeadWeights | None = None,
        *,
        dtype: str = "float32",
        max_total_tokens: int | None = None,
        parts: Mapping[str, Any] | None = None,
        ranks: GroupRanks | None = None,
        **engine: Any,
    ) -> Engine:
        """Build an engine of the target.

        Args:
            speculation: drafter and policy; plain decoding by default.
            draft: what drafts, where the policy drafts with a model or a head.
            dtype: of the target.
            max_total_tokens: the workload's own by default.
            parts: what `build_engine` is given beside (policy, profile, backend, drafter).
            ranks: the group that this process leads, to which the target is dealt.
            engine: settings of `EngineConfig`.
        """
        target = self.target(dtype)
        return build_engine(
            target if ranks is None else dealt(target, ranks, self.vocab_size),
            draft,
            engine=EngineConfig.model_validate(engine),
            speculation=speculation,
            max_total_tokens=max_total_tokens or self.max_total_tokens,
            vocab_size=self.vocab_size,
            **(parts or {}),
        )

    def profile(
        self, engine: Engine, draft: PreTrainedModel | HeadWeights, *, dtype: str = "float32", budget_s: float
    ) -> MadeProfile:
        """Measure what a policy goes by, of an engine with a `Placeholder` for one, on samples of no measured run."""
        provenance = provenance_of(
            self.target(dtype),
            draft,
            engine=EngineConfig(max_running_samples=engine.runner.pool.num_slots),
            dtype=dtype,
            sampling=self.sampling,
            max_total_tokens=self.max_total_tokens,
        )
        return make_profile(engine, self.requests(PROFILE_INDEX), provenance, budget_s=budget_s)

    def requests(self, first_index: int = 0, **changes: float) -> list[SampleRequest]:
        """One request a prompt, sampling changed as said, keys from `first_index` on."""
        sampling = replace(self.sampling, **changes)
        return [
            SampleRequest(
                key=SampleKey(run_seed=BENCH_SEED, stream=Stream.BENCH, sample_index=first_index + index),
                prompt=prompt,
                sampling=sampling,
            )
            for index, prompt in enumerate(self.prompts)
        ]


def demo_workload(num_prompts: int, cache_dir: Path | None = None) -> Workload:
    """The embedded pair on its chain task."""
    with job("making the demo pair") as tick:
        paths = make_demo_pair(cache_dir or default_cache_dir(), progress=tick)
    return _workload("demo", paths, DataConfig(task="chain"), num_prompts, max_new_tokens=256)


def gsm8k_workload(data: Path, num_prompts: int, cache_dir: Path | None = None) -> Workload:
    """A pair made from a question/answer JSONL file, on its first questions."""
    folder = (cache_dir or default_cache_dir()) / "bench-gsm8k"
    paths = PairPaths(target=folder / "target", draft=folder / "draft")
    if not (folder / "target").is_dir():
        with job("making a pair from the given data") as tick:
            paths = make_pair_from_text([data], folder, progress=tick)
    config = DataConfig(path=str(data), prompt_template="{prompt}\n", shuffle=False, limit=num_prompts)
    return _workload("gsm8k", paths, config, num_prompts, max_new_tokens=200)


def default_cache_dir() -> Path:
    """Where the project keeps pairs it made."""
    return Path(RunConfig().cache_dir).expanduser()


def _workload(
    name: str, paths: PairPaths, data: DataConfig, num_prompts: int, *, max_new_tokens: int
) -> Workload:
    tokenizer = load_tokenizer(str(paths.target))
    dataset = load_prompts(data, tokenizer, seed=BENCH_SEED)
    return Workload(
        name=name,
        paths=paths,
        known_tokenizer=tokenizer,
        prompts=[dataset.prompts[index] for index in range(num_prompts)],
        sampling=sampling_params(SamplingConfig(max_new_tokens=max_new_tokens), tokenizer),
    )


@contextmanager
def job(description: str) -> Iterator:
    """Show a progress bar; yields `tick(what, fraction)`."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(description, total=1.0)
        yield lambda what, fraction: progress.update(task, description=what, completed=fraction)


REAL_MODEL = "smollm2-135m-instruct"
DRAFT_LAYERS = 4
"Of 30: with the vocabulary's matrix a third of a target forward."


def real_workload(
    num_prompts: int, *, data: Path | None, max_new_tokens: int, console: Console
) -> Workload | None:
    """Return the model with its prompts; None, having said why, when the model cannot be had."""
    target = real_model(console)
    if target is None:
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
        known_tokenizer=tokenizer,
        prompts=dataset.prompts[:num_prompts],
        sampling=sampling_params(SamplingConfig(max_new_tokens=max_new_tokens), tokenizer),
    )


def real_model(console: Console) -> Path | None:
    """Return the model's folder; None, having said why, when it cannot be had."""
    try:
        with job(f"getting {REAL_MODEL}") as tick:
            return get_model(REAL_MODEL, default_cache_dir(), progress=tick).path
    except ModelError as error:
        console.print(f"skipped: {error}", markup=False)
        return None


def _first_layers(target: Path) -> Path:
    """The target cut behind its first layers, made once and kept in the cache."""
    folder = default_cache_dir() / f"bench-{REAL_MODEL}-first-{DRAFT_LAYERS}"
    if not (folder / "config.json").is_file():
        model = first_layers(load_causal_lm(str(target), "float32"), DRAFT_LAYERS)
        with whole_folder(folder) as partial:
            model.save_pretrained(partial)
            load_tokenizer(str(target)).save_pretrained(partial)
    return folder


VOCAB_SIZE = 4096
PROMPT_TOKENS = 64
"All prompts are equally long: some peers feed longer ones token by token."
NEW_TOKENS = 128
_SEED = 20260


def model_p_folder(cache_dir: Path) -> Path:
    """Make the checkpoint once; returns its folder."""
    folder = cache_dir / "model-p"
    if not (folder / "config.json").is_file():
        torch.manual_seed(_SEED)
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            eos_token_id=None,
            bos_token_id=None,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def model_p(count: int, *, prompt_tokens: int = PROMPT_TOKENS, new_tokens: int = NEW_TOKENS) -> Workload:
    """Model P with random prompts of one length, greedy, no stop token; it is its own draft."""
    random, folder = np.random.default_rng(_SEED), model_p_folder(default_cache_dir())
    return Workload(
        name="p",
        paths=PairPaths(target=folder, draft=folder),
        known_tokenizer=None,
        prompts=[
            Prompt(prompt_id=index, token_ids=random.integers(1, VOCAB_SIZE, prompt_tokens))
            for index in range(count)
        ],
        sampling=SamplingParams(max_new_tokens=new_tokens, temperature=0.0),
    )


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """The model cut behind its first layers: a draft of the same vocabulary."""
    model.base_model.layers = model.base_model.layers[:count]  # type: ignore[union-attr,index]
    model.config.num_hidden_layers = count
    return model


SAMPLES_PER_PROMPT = 2


def grouped_requests(
    workload: Workload, first_index: int = 0, *, samples: int = SAMPLES_PER_PROMPT, **changes: float
) -> list[SampleRequest]:
    """So many requests a prompt, one group after the other; keys from `first_index` on, sampling changed as said."""
    num_prompts = len(workload.prompts)
    lots = [workload.requests(first_index + lot * num_prompts, **changes) for lot in range(samples)]
    return [
        replace(request, group_id=group)
        for group, members in enumerate(zip(*lots, strict=True))
        for request in members
    ]


def alternating_rollouts(
    requests: Sequence[SampleRequest], completions: Iterable[Completion]
) -> list[Rollout]:
    """Completions of `grouped_requests`, in their order, with the rewards 0 and 1 in each group."""
    return [
        Rollout(
            prompt=request.prompt,
            completion=completion,
            response_text="",
            reward=Reward(value=float(number % SAMPLES_PER_PROMPT)),
        )
        for number, (request, completion) in enumerate(zip(requests, completions, strict=True))
    ]
