"""Which samples of a run there are, which of them can be generated again here, and which are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...core.config import Config
from ...core.config_io import load_config
from ...core.errors import ConfigError, DataError
from ..folder.layout import RunDir
from ..folder.rollouts import SampleLocation, locations_in, rollout_files
from ..folder.run_time import of_folder
from .kept_weights import KeptWeights
from .verification import Difference, Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run folder, and the config by which its samples are generated again."""

    folder: Path
    config: Config

    @classmethod
    def open(cls, run: Path, overrides: Sequence[str] = ()) -> RecordedRun:
        """Read a folder, some keys of its config overridden. Raises ConfigError: it is no run's."""
        file = RunDir(path=run).config_file
        if not file.is_file() or not (run / "rollouts").is_dir():
            raise ConfigError(f"{run} is no run folder: expected config.yaml and rollouts/ in it")
        return cls(folder=run.absolute(), config=of_folder(load_config(file, overrides), run))

    def relative(self, file: Path) -> str:
        """How a file of the folder is called in messages."""
        return str(file.relative_to(self.folder))


def all_locations(run: RecordedRun, verification: Verification) -> list[SampleLocation]:
    """All samples; files that cannot be read, foreign keys and second copies are differences."""
    locations: dict[object, SampleLocation] = {}
    run_seed, max_staleness = run.config.run.seed, run.config.rollout.max_staleness
    for file in rollout_files(run.folder):
        name = run.relative(file)
        try:
            found = locations_in(file)
        except DataError as error:
            verification.differences.append(
                Difference(file=name, what="file", expected="rollouts of a run", got=str(error))
            )
            continue
        verification.num_recorded += len(found)
        for location in found:
            index = location.key.sample_index
            if location.key.run_seed != run_seed:
                what, expected, got = "run seed", str(run_seed), str(location.key.run_seed)
            elif (
                max_staleness and not 0 <= location.iteration - min(location.weight_versions) <= max_staleness
            ):
                what, expected = "oldest weight version", f"{location.iteration - max_staleness} or later"
                got = str(min(location.weight_versions))
            elif location.key in locations:
                other = run.relative(locations[location.key].file)
                what, expected, got = "copies of the sample", "1", f"another one in {other}"
            else:
                locations[location.key] = location
                continue
            verification.differences.append(
                Difference(file=name, sample=index, what=what, expected=expected, got=got)
            )
    return list(locations.values())


def verifiable(
    locations: Sequence[SampleLocation],
    metrics: Mapping[int, Mapping[str, float]],
    weights: KeptWeights,
    run: RecordedRun,
    verification: Verification,
) -> list[SampleLocation]:
    """Samples that can be generated again here; the others are counted by reason. `metrics` by iteration."""
    why_not, max_staleness = why_not_here(run), run.config.rollout.max_staleness
    loose = {iteration for iteration, row in metrics.items() if row.get("rollout/invariant") == 0.0}
    needed = {version for location in locations for version in location.weight_versions}
    missing = sorted(needed - weights.targets.keys() - weights.damaged)
    good = []
    for location in locations:
        if why_not:
            verification.unverified[why_not] += 1
        elif loose & set(range(location.iteration - max_staleness, location.iteration + 1)):
            verification.unverified[
                "the run promised no bits in their iteration (rollout/invariant is 0)"
            ] += 1
        elif weights.targets.keys() >= set(location.weight_versions):
            good.append(location)
        elif damaged := weights.damaged & set(location.weight_versions):
            verification.unverified[f"the weights of {_versions(sorted(damaged))} are damaged"] += 1
        else:
            which = _versions(missing)
            verification.unverified[
                f"weights of {which} are not kept; run.checkpoint_every=1 keeps every one, and "
                "run.keep_checkpoints=null all of these"
            ] += 1
    return good


def why_not_here(run: RecordedRun) -> str:
    """Why nothing of a run can be generated again on this machine; empty where its configuration allows it."""
    engine, on_gpu = run.config.engine, run.config.decodes_on_gpu
    if on_gpu and engine.numerics != "invariant":
        return "instances decoded on GPUs, which promise no bits (engine.numerics=invariant does)"
    if on_gpu and not torch.cuda.is_available():
        return "instances decoded on GPUs, and there is none here"
    if engine.numerics == "fast":
        return "the run promised no bits (engine.numerics is fast)"
    if not on_gpu and engine.num_threads > 1:
        return "the run promised no bits (engine.num_threads is above 1)"
    return ""


def _versions(numbers: Sequence[int]) -> str:
    """`version 3`, or `versions 1 to 7` where there are several."""
    if len(numbers) == 1:
        return f"version {numbers[0]}"
    whole = len(numbers) == numbers[-1] - numbers[0] + 1
    return f"versions {numbers[0]} to {numbers[-1]}" + ("" if whole else f" ({len(numbers)} of them)")


def drawn(locations: Sequence[SampleLocation], *, share: float, seed: int) -> list[SampleLocation]:
    """A random share, at least one sample, in the order of files and rows."""
    if not locations:
        return []
    count = min(len(locations), max(1, round(share * len(locations))))
    chosen = np.random.default_rng(seed).choice(len(locations), size=count, replace=False)
    return [locations[index] for index in sorted(chosen.tolist())]
