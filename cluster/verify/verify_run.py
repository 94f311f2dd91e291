"""Verifies a run from its folder: draws samples, generates them again, computes rewards again, compares."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoModelForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...core.errors import DataError, InputError
from ...core.metrics import read_metrics
from ...core.records import Completion
from ...core.settings.run import ModelsConfig
from ...engine.model.compute_backend import ComputeBackend
from ...engine.weights.causal_lm import max_context_tokens
from ...engine.weights.loading import load_hf_config
from ...learning.data.chat.written_text import response_text, text_without_special_tokens
from ...learning.data.prompts import sampling_params
from ..folder.layout import RunDir
from ..folder.rollouts import Recorded, SampleLocation, read_recorded
from ..observe.outcome_checks import faults
from ..plan.inputs import read_tokenizer
from ..plan.model_files import count_params
from ..ray_start.machine import memory_bytes, num_cores
from .choice import RecordedRun, all_locations, drawn, verifiable
from .kept_weights import KeptWeights, find_weights
from .regeneration import (
    NotLoaded,
    OtherWeights,
    Regenerated,
    Regenerator,
    Work,
    regenerate,
)
from .rewards_again import RewardsAgain
from .verification import Difference, Verification, completion_differences

Tick = Callable[[str, float], None]
"Told a stage and how much of it is done, from 0 to 1."
_MOST_SAMPLES = 256
"Of one piece of work: several engines share a large iteration."
_EARLIER_TEXTS = (
    "texts are of an earlier version, which left special tokens out; rewards were computed of those"
)


def verify_run(
    folder: Path,
    *,
    share: float = 0.02,
    seed: int = 0,
    num_engines: int | None = None,
    overrides: Sequence[str] = (),
    tick: Tick = lambda stage, fraction: None,
) -> Verification:
    """Verify a run folder, finished or not; nothing is written there.

    Args:
        folder: of the run.
        share: of the samples that can be generated again, how many are; at least one.
        seed: draws them.
        num_engines: that generate at once; by default one a core, as far as memory has room for their weights.
        overrides: `section.key=value` of the config, for what is elsewhere by now.
        tick: told of progress.

    Raises:
        InputError: no run folder, a model or tokenizer that cannot be loaded.
    """
    began_s = time.perf_counter()
    run = RecordedRun.open(folder, overrides)
    models, on_gpu = run.config.models, run.config.decodes_on_gpu
    verification = Verification(seed=seed)
    tick("checkpoints", 0.0)
    weights = find_weights(run.folder, models.target)
    verification.num_checkpoints, verification.differences = weights.num_checkpoints, [*weights.differences]
    verification.notes += [
        f"checkpoint {name} has no manifest to be compared with" for name in weights.unverified
    ]
    locations = all_locations(run, verification)
    metrics = _metrics(run.folder)
    verification.faults = faults([*metrics.values()])
    good = verifiable(locations, metrics, weights, run, verification)
    chosen = drawn(good, share=share, seed=seed)
    if samples := _read(run, chosen, verification):
        if any(sample.rollout.completion.sampled is not None for sample in samples):
            verification.notes.append(
                "of episodes, what the environment said and where turns end is taken from the files"
            )
        started_s = time.perf_counter()
        works = _works(samples)
        num_engines = min(num_engines or _most_engines(models, on_gpu=on_gpu), len(works))
        tick(f"starting {num_engines} engines", 0.0)
        tools = _Tools.start(run, weights, samples, verification, num_engines=num_engines)
        verification.start_s = time.perf_counter() - started_s
        _regenerate(works, tools, verification, tick)
        verification.generated_s = _generated_s(metrics, locations, chosen)
    verification.differences.sort(key=lambda one: (one.file, -1 if one.sample is None else one.sample))
    verification.seconds = time.perf_counter() - began_s - verification.start_s
    return verification


def _read(
    run: RecordedRun, locations: Sequence[SampleLocation], verification: Verification
) -> list[Recorded]:
    by_file: dict[Path, list[SampleLocation]] = defaultdict(list)
    for location in locations:
        by_file[location.file].append(location)
    samples: list[Recorded] = []
    for file, those in by_file.items():
        try:
            samples += read_recorded(those)
        except DataError as error:
            verification.differences.append(
                Difference(file=run.relative(file), what="file", expected="rollouts of a run", got=str(error))
            )
    return samples


def _most_engines(models: ModelsConfig, *, on_gpu: bool) -> int:
    """One a core, each with weights, their laid-out copies and the next version; on a GPU one."""
    if on_gpu:
        return 1
    hf_config = load_hf_config(models.target, trust_remote_code=models.trust_remote_code)
    # laid-out copies are float32
    needed = 3 * 4 * count_params(hf_config, AutoModelForCausalLM, models.target)
    available = memory_bytes()
    return num_cores() if available is None else max(1, min(num_cores(), available // needed))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tools:
    """What generates and scores again."""

    run: RecordedRun
    weights: KeptWeights
    tokenizer: PreTrainedTokenizerBase
    engines: Sequence[Regenerator]
    rewards: RewardsAgain | None

    @staticmethod
    def start(
        run: RecordedRun,
        weights: KeptWeights,
        samples: Sequence[Recorded],
        verification: Verification,
        *,
        num_engines: int,
    ) -> _Tools:
        """Raises InputError: a model that cannot be loaded, or an engine that promises no bits here."""
        config = run.config
        tokenizer = read_tokenizer(config.models, config.run.template_time)
        sampling = sampling_params(config.sampling, tokenizer, model=config.models.target)
        hf_config = load_hf_config(config.models.target, trust_remote_code=config.models.trust_remote_code)
        longest = max(len(sample.rollout.prompt.token_ids) for sample in samples) + sampling.max_new_tokens
        # longer ones are refused, and said to differ
        longest = min(longest, max_context_tokens(hf_config) or longest)
        engines = [
            Regenerator(run, tokenizer, sampling, weights.targets, max_total_tokens=longest)
            for _ in range(num_engines)
        ]
        if engines[0].engine.numerics != "invariant":
            raise InputError(f"nothing can be verified here: {engines[0].engine.promise}")
        if engines[0].engine.runner.backend.name == ComputeBackend.name:
            verification.notes.append(
                "computed by torch's products, which round by the processor: verify on the run's kind of processor"
            )
        rewards = None
        try:
            rewards = RewardsAgain(run, tokenizer)
        except InputError as error:
            verification.notes.append(f"rewards are not verified: {error}")
        return _Tools(run=run, weights=weights, tokenizer=tokenizer, engines=engines, rewards=rewards)


def _regenerate(works: Sequence[Work], tools: _Tools, verification: Verification, tick: Tick) -> None:
    """Generate the samples again and compare all there is to compare."""
    total, num_done = sum(len(work.samples) for work in works), 0
    stage = f"regenerating {total} samples"
    tick(stage, 0.0)
    for answer in regenerate(works, tools.engines, num_threads=tools.run.config.engine.num_threads):
        num_done += len(answer.work.samples)
        if isinstance(answer, Regenerated):
            _compare(answer, tools, verification)
        else:
            _other_weights(answer, tools, verification)
        tick(stage, num_done / total)


def _other_weights(answer: NotLoaded, tools: _Tools, verification: Verification) -> None:
    error = answer.error
    other = isinstance(error, OtherWeights)
    version = error.version if isinstance(error, OtherWeights) else answer.work.weight_version
    difference = Difference(
        file=tools.weights.targets[version].name,
        what=f"parameter checksum of weight version {version}",
        expected=f"{error.expected} (as published)" if other else "weights that can be loaded",
        got=error.got if other else str(error),
    )
    if difference not in verification.differences:
        verification.differences.append(difference)
    verification.unverified[f"the weights of version {version} are not the run's"] += len(answer.work.samples)


def _works(samples: Sequence[Recorded]) -> list[Work]:
    by_version: dict[int, list[Recorded]] = defaultdict(list)
    for sample in samples:
        for version in dict.fromkeys(sample.location.weight_versions):
            by_version[version].append(sample)
    return [
        Work(weight_version=version, samples=those[start : start + _MOST_SAMPLES])
        for version, those in sorted(by_version.items())
        for start in range(0, len(those), _MOST_SAMPLES)
    ]


def _compare(answer: Regenerated, tools: _Tools, verification: Verification) -> None:
    by_file: dict[str, list[tuple[Recorded, Completion, str]]] = defaultdict(list)
    for sample, again in zip(answer.work.samples, answer.completions, strict=True):
        file, recorded = tools.run.relative(sample.location.file), sample.rollout.completion
        index = recorded.key.sample_index
        is_last = answer.work.weight_version == sample.location.weight_versions[-1]
        verification.num_regenerated += is_last
        if again is None:
            said = answer.refused[recorded.key]
            verification.differences.append(
                Difference(
                    file=file, sample=index, what="prompt", expected="one that can be sampled", got=said
                )
            )
            continue
        verification.num_tokens += again.num_sampled_tokens if is_last else 0
        verification.differences += completion_differences(
            file, recorded, again, ends=recorded.sampled is None
        )
        text = response_text(tools.tokenizer, again)
        if text != sample.rollout.response_text == text_without_special_tokens(tools.tokenizer, again):
            text = sample.rollout.response_text
            if _EARLIER_TEXTS not in verification.notes:
                verification.notes.append(_EARLIER_TEXTS)
        if text != sample.rollout.response_text:
            verification.differences.append(
                Difference(
                    file=file,
                    sample=index,
                    what="response text",
                    expected=repr(text),
                    got=repr(sample.rollout.response_text),
                )
            )
        if is_last:
            by_file[file].append((sample, again, text))
    if tools.rewards is not None:
        for file, rows in by_file.items():
            those, completions, texts = zip(*rows, strict=True)
            verification.differences += tools.rewards.differences(file, those, completions, texts)
            verification.num_rewards += len(rows)


def _metrics(run: Path) -> dict[int, dict[str, float]]:
    """The metrics of every iteration that is finished."""
    file = RunDir(path=run).metrics_file
    rows = read_metrics(file) if file.is_file() else []
    return {int(row["iteration"]): row for row in rows if "iteration" in row}


def _generated_s(
    metrics: Mapping[int, Mapping[str, float]],
    locations: Sequence[SampleLocation],
    chosen: Sequence[SampleLocation],
) -> float:
    """What the run took to generate the chosen samples: their share of each iteration's seconds."""
    whole = Counter(location.iteration for location in locations)
    part = Counter(location.iteration for location in chosen)
    return sum(
        metrics.get(iteration, {}).get("time/generate_s", 0.0) * count / whole[iteration]
        for iteration, count in part.items()
    )
