"""What the benchmarks decode: a model pair with prompts of its own task.

`demo` is the embedded pair on its chain task; `gsm8k` a pair made from a question/answer file given by path, on
questions of that file. Pairs are made once and cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from rlhfspec.core.config import DataConfig, RunConfig, SamplingConfig
from rlhfspec.core.records import Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from rlhfspec.engine.weights.loading import load_causal_lm, load_tokenizer, num_token_ids
from rlhfspec.learning.data.prompts import load_prompts, sampling_params
from rlhfspec.learning.models.make import PairPaths, make_demo_pair, make_pair_from_text

BENCH_SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A pair, its tokenizer, and prompts."""

    name: str
    paths: PairPaths
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    "T = 1, unfiltered, with the task's limit and stop tokens"

    @property
    def vocab_size(self) -> int:
        """Token ids the tokenizer knows."""
        return num_token_ids(self.tokenizer)

    @property
    def pad_token_id(self) -> int:
        """The padding token, the first stop token where there is none."""
        pad = self.tokenizer.pad_token_id
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
        tokenizer=tokenizer,
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
