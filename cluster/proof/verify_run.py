"""Verifies a run from its folder: draws samples, generates them again, computes rewards again, compares."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from cluster.placement.machine import num_cores
from cluster.preflight.inputs import read_tokenizer
from cluster.proof.choice import all_places, drawn, verifiable
from cluster.proof.difference import Difference, completion_differences
from cluster.proof.kept_weights import KeptWeights, find_weights
from cluster.proof.proof_record import Proof
from cluster.proof.recorded_samples import Place, Recorded, read_recorded
from cluster.proof.regeneration import Regenerated, Regenerator, Work, regenerate
from cluster.proof.rewards_again import RewardsAgain
from cluster.run_folder.layout import RunDir
from core.config import Config
from core.config_io import load_config
from core.errors import ConfigError, DataError, InputError
from core.metrics import read_metrics
from core.records import Completion
from engine.weights.causal_lm import max_context_tokens
from engine.weights.loading import load_hf_config
from learning.data.prompts import response_text, sampling_params

Tick = Callable[[str, float], None]
"Told a stage and how much of it is done, from 0 to 1."
_MOST_SAMPLES = 256
"Of one piece of work: several engines share a large iteration."


def verify_run(
    run: Path,
    *,
    share: float = 0.02,
    seed: int = 0,
    num_engines: int | None = None,
    tick: Tick = lambda stage, fraction: None,
) -> Proof:
    """Verify a run folder, finished or not; nothing is written there.

    Args:
        run: the folder.
        share: of the samples that can be generated again, how many are; at least one.
        seed: draws them.
        num_engines: that generate at once, each with a copy of the weights; by default one a core.
        tick: told of progress.

    Raises:
        InputError: no run folder, a model or tokenizer that cannot be loaded.
    """
    began_s = time.perf_counter()
    run = run.absolute()
    config = load_config(_config_file(run), [])
    proof = Proof(seed=seed)
    tick("checkpoints", 0.0)
    weights = find_weights(run, config)
    proof.num_checkpoints, proof.differences = weights.num_checkpoints, [*weights.differences]
    proof.notes += [f"checkpoint {name} has no manifest to be compared with" for name in weights.unverified]
    places = all_places(run, config, proof)
    metrics = _metrics(run)
    good = verifiable(places, metrics, config, weights, proof)
    chosen = drawn(good, share=share, seed=seed)
    if chosen:
        tokenizer = read_tokenizer(config)
        samples = _read(run, chosen, proof)
        _regenerate(run, config, tokenizer, weights, samples, proof, num_engines or num_cores(), tick)
        proof.generated_s = _generated_s(metrics, places, chosen)
    proof.differences.sort(key=lambda one: (one.file, -1 if one.sample is None else one.sample))
    proof.seconds = time.perf_counter() - began_s
    return proof


def _config_file(run: Path) -> Path:
    file = RunDir(path=run).config_file
    if not file.is_file() or not (run / "rollouts").is_dir():
        raise ConfigError(f"{run} is no run folder: expected config.yaml and rollouts/ in it")
    return file


def _read(run: Path, places: Sequence[Place], proof: Proof) -> list[Recorded]:
    by_file: dict[Path, list[Place]] = defaultdict(list)
    for place in places:
        by_file[place.file].append(place)
    samples: list[Recorded] = []
    for file, those in by_file.items():
        try:
            samples += read_recorded(those)
        except DataError as error:
            proof.differences.append(
                Difference(
                    file=str(file.relative_to(run)), what="file", expected="rollouts of a run", got=str(error)
                )
            )
    return samples


def _regenerate(
    run: Path,
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    weights: KeptWeights,
    samples: Sequence[Recorded],
    proof: Proof,
    num_engines: int,
    tick: Tick,
) -> None:
    """Generate the samples again and compare all there is to compare."""
    sampling = sampling_params(config.sampling, tokenizer, model=config.models.target)
    longest = max((len(sample.rollout.prompt.token_ids) for sample in samples), default=0)
    hf_config = load_hf_config(config.models.target, trust_remote_code=config.models.trust_remote_code)
    limit = max_context_tokens(hf_config)
    max_total_tokens = min(longest + sampling.max_new_tokens, limit or longest + sampling.max_new_tokens)
    rewards = _rewards(config, tokenizer, proof)
    if any(sample.rollout.completion.sampled is not None for sample in samples):
        proof.notes.append(
            "of episodes, where a turn ends and what the environment said is taken from the record"
        )

    def make() -> Regenerator:
        regenerator = Regenerator(
            config, tokenizer, sampling, weights.targets, max_total_tokens=max_total_tokens
        )
        if regenerator.engine.numerics != "invariant":
            raise InputError(f"nothing can be verified here: {regenerator.engine.promise}")
        return regenerator

    works = _works(samples)
    num_done = 0
    tick(f"regenerating {len(samples)} samples", 0.0)
    for answer in regenerate(
        works, make, num_engines=min(num_engines, len(works)), num_threads=config.engine.num_threads
    ):
        if isinstance(answer, Regenerated):
            num_done += len(answer.work.samples)
            _compare(run, tokenizer, answer, rewards, proof)
        else:
            work, error = answer
            num_done += len(work.samples)
            version = work.weight_version
            difference = Difference(
                file=weights.targets[version].name,
                what=f"parameters of weight version {version}",
                expected="those that the run published",
                got=str(error),
            )
            if difference not in proof.differences:
                proof.differences.append(difference)
            proof.unverified[f"the weights of version {version} are not the run's"] += len(work.samples)
        tick(f"regenerating {len(samples)} samples", num_done / len(samples))


def _rewards(config: Config, tokenizer: PreTrainedTokenizerBase, proof: Proof) -> RewardsAgain | None:
    try:
        return RewardsAgain(config, tokenizer)
    except InputError as error:
        proof.notes.append(f"rewards are not verified: {error}")
        return None


def _works(samples: Sequence[Recorded]) -> list[Work]:
    by_version: dict[int, list[Recorded]] = defaultdict(list)
    for sample in samples:
        by_version[sample.place.weight_version].append(sample)
    return [
        Work(weight_version=version, samples=those[start : start + _MOST_SAMPLES])
        for version, those in sorted(by_version.items())
        for start in range(0, len(those), _MOST_SAMPLES)
    ]


def _compare(
    run: Path,
    tokenizer: PreTrainedTokenizerBase,
    answer: Regenerated,
    rewards: RewardsAgain | None,
    proof: Proof,
) -> None:
    by_file: dict[str, list[tuple[Recorded, Completion, str]]] = defaultdict(list)
    for sample, again in zip(answer.work.samples, answer.completions, strict=True):
        file, recorded = str(sample.place.file.relative_to(run)), sample.rollout.completion
        index = recorded.key.sample_index
        proof.num_regenerated += 1
        if again is None:
            said = answer.refused[recorded.key]
            proof.differences.append(
                Difference(
                    file=file, sample=index, what="prompt", expected="one that can be sampled", got=said
                )
            )
            continue
        proof.num_tokens += again.num_sampled_tokens
        proof.differences += completion_differences(file, recorded, again, ends=recorded.sampled is None)
        text = response_text(tokenizer, again)
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
        by_file[file].append((sample, again, text))
    if rewards is not None:
        for file, rows in by_file.items():
            those, completions, texts = zip(*rows, strict=True)
            proof.differences += rewards.differences(file, those, completions, texts)
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
