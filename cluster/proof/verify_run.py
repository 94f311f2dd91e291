"""Verifies a run from its folder: draws samples, generates them again, computes rewards again, compares."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoModelForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.folder.rollouts import Place, Recorded, read_recorded
from rlhfspec.cluster.placement.machine import memory_bytes, num_cores
from rlhfspec.cluster.plan.inputs import read_tokenizer
from rlhfspec.cluster.plan.model_files import count_params
from rlhfspec.cluster.proof.choice import RecordedRun, all_places, drawn, verifiable
from rlhfspec.cluster.proof.kept_weights import KeptWeights, find_weights
from rlhfspec.cluster.proof.proof_record import Difference, Proof, completion_differences
from rlhfspec.cluster.proof.regeneration import (
    NotLoaded,
    OtherWeights,
    Regenerated,
    Regenerator,
    Work,
    regenerate,
)
from rlhfspec.cluster.proof.rewards_again import RewardsAgain
from rlhfspec.core.errors import DataError, InputError
from rlhfspec.core.metrics import read_metrics
from rlhfspec.core.records import Completion
from rlhfspec.core.settings.run import ModelsConfig
from rlhfspec.engine.model.compute_backend import ComputeBackend
from rlhfspec.engine.weights.causal_lm import max_context_tokens
from rlhfspec.engine.weights.loading import load_hf_config
from rlhfspec.learning.data.prompts import sampling_params
from rlhfspec.learning.rewards.written_text import response_text, text_without_special_tokens

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
) -> Proof:
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
    proof = Proof(seed=seed)
    tick("checkpoints", 0.0)
    weights = find_weights(run.folder, models.target)
    proof.num_checkpoints, proof.differences = weights.num_checkpoints, [*weights.differences]
    proof.notes += [f"checkpoint {name} has no manifest to be compared with" for name in weights.unverified]
    places = all_places(run, proof)
    metrics = _metrics(run.folder)
    good = verifiable(places, metrics, weights, run, proof)
    chosen = drawn(good, share=share, seed=seed)
    if samples := _read(run, chosen, proof):
        if any(sample.rollout.completion.sampled is not None for sample in samples):
            proof.notes.append(
                "of episodes, what the environment said and where turns end is taken from the files"
            )
        started_s = time.perf_counter()
        works = _works(samples)
        num_engines = min(num_engines or _most_engines(models, on_gpu=on_gpu), len(works))
        tick(f"starting {num_engines} engines", 0.0)
        tools = _Tools.start(run, weights, samples, proof, num_engines=num_engines)
        proof.start_s = time.perf_counter() - started_s
        _regenerate(works, tools, proof, tick)
        proof.generated_s = _generated_s(metrics, places, chosen)
    proof.differences.sort(key=lambda one: (one.file, -1 if one.sample is None else one.sample))
    proof.seconds = time.perf_counter() - began_s - proof.start_s
    return proof


def _read(run: RecordedRun, places: Sequence[Place], proof: Proof) -> list[Recorded]:
    by_file: dict[Path, list[Place]] = defaultdict(list)
    for place in places:
        by_file[place.file].append(place)
    samples: list[Recorded] = []
    for file, those in by_file.items():
        try:
            samples += read_recorded(those)
        except DataError as error:
            proof.differences.append(
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
        proof: Proof,
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
            proof.notes.append(
                "computed by torch's products, which round by the processor: verify on the run's kind of processor"
            )
        rewards = None
        try:
            rewards = RewardsAgain(run, tokenizer)
        except InputError as error:
            proof.notes.append(f"rewards are not verified: {error}")
        return _Tools(run=run, weights=weights, tokenizer=tokenizer, engines=engines, rewards=rewards)


def _regenerate(works: Sequence[Work], tools: _Tools, proof: Proof, tick: Tick) -> None:
    """Generate the samples again and compare all there is to compare."""
    total, num_done = sum(len(work.samples) for work in works), 0
    stage = f"regenerating {total} samples"
    tick(stage, 0.0)
    for answer in regenerate(works, tools.engines, num_threads=tools.run.config.engine.num_threads):
        num_done += len(answer.work.samples)
        if isinstance(answer, Regenerated):
            _compare(answer, tools, proof)
        else:
            _other_weights(answer, tools, proof)
        tick(stage, num_done / total)


def _other_weights(answer: NotLoaded, tools: _Tools, proof: Proof) -> None:
    error = answer.error
    other = isinstance(error, OtherWeights)
    version = error.version if isinstance(error, OtherWeights) else answer.work.weight_version
    difference = Difference(
        file=tools.weights.targets[version].name,
        what=f"parameter checksum of weight version {version}",
        expected=f"{error.expected} (as published)" if other else "weights that can be loaded",
        got=error.got if other else str(error),
    )
    if difference not in proof.differences:
        proof.differences.append(difference)
    proof.unverified[f"the weights of version {version} are not the run's"] += len(answer.work.samples)


def _works(samples: Sequence[Recorded]) -> list[Work]:
    by_version: dict[int, list[Recorded]] = defaultdict(list)
    for sample in samples:
        for version in dict.fromkeys(sample.place.weight_versions):
            by_version[version].append(sample)
    return [
        Work(weight_version=version, samples=those[start : start + _MOST_SAMPLES])
        for version, those in sorted(by_version.items())
        for start in range(0, len(those), _MOST_SAMPLES)
    ]


def _compare(answer: Regenerated, tools: _Tools, proof: Proof) -> None:
    by_file: dict[str, list[tuple[Recorded, Completion, str]]] = defaultdict(list)
    for sample, again in zip(answer.work.samples, answer.completions, strict=True):
        file, recorded = tools.run.relative(sample.place.file), sample.rollout.completion
        index = recorded.key.sample_index
        is_last = answer.work.weight_version == sample.place.weight_versions[-1]
        proof.num_regenerated += is_last
        if again is None:
            said = answer.refused[recorded.key]
            proof.differences.append(
                Difference(
                    file=file, sample=index, what="prompt", expected="one that can be sampled", got=said
                )
            )
            continue
        proof.num_tokens += again.num_sampled_tokens if is_last else 0
        proof.differences += completion_differences(file, recorded, again, ends=recorded.sampled is None)
        text = response_text(tools.tokenizer, again)
        if text != sample.rollout.response_text == text_without_special_tokens(tools.tokenizer, again):
            text = sample.rollout.response_text
            if _EARLIER_TEXTS not in proof.notes:
                proof.notes.append(_EARLIER_TEXTS)
        if text != sample.rollout.response_text:
            proof.differences.append(
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
            proof.differences += tools.rewards.differences(file, those, completions, texts)
            proof.num_rewards += len(rows)


def _metrics(run: Path) -> dict[int, dict[str, float]]:
    """The figures of every iteration that is finished."""
    file = RunDir(path=run).metrics_file
    rows = read_metrics(file) if file.is_file() else []
    return {int(row["iteration"]): row for row in rows if "iteration" in row}


def _generated_s(
    metrics: Mapping[int, Mapping[str, float]], places: Sequence[Place], chosen: Sequence[Place]
) -> float:
    """What the run took to generate the chosen samples: their share of each iteration's seconds."""
    whole = Counter(place.iteration for place in places)
    part = Counter(place.iteration for place in chosen)
    return sum(
        metrics.get(iteration, {}).get("time/generate_s", 0.0) * count / whole[iteration]
        for iteration, count in part.items()
    )
