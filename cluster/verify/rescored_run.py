"""Another reward over the samples that a run has recorded: old and new side by side. Nothing is generated."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ...core.errors import ConfigError, DataError
from ...core.files import write_whole
from ...core.outside import visible
from ...core.records import Reward, Unscored
from ...learning.training.objectives.advantages import group_advantages
from ..folder.rollouts import iteration_of, locations_in, read_recorded, rollout_files
from ..observe.summary import unread_line
from ..plan.inputs import read_tokenizer
from .choice import RecordedRun
from .rewards_again import RewardsAgain

_SHOWN = 5
"Samples that changed most."
_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoredRun:
    """Samples in the order of iterations and rows, with both rewards and GRPO's advantages; why others have none."""

    samples: Sequence[Mapping[str, Any]]
    unscored: Sequence[str]
    seconds: float
    "of reading and scoring, without the start"
    unread: str | None = None

    def lines(self) -> list[str]:
        """What to print."""
        old, new = self._values("old"), self._values("new")
        gaps = np.abs(self._values("new_advantage") - self._values("old_advantage"))
        changed = np.flatnonzero(old != new)
        varies = bool(np.ptp(old) and np.ptp(new))
        correlation = f"{np.corrcoef(old, new)[0, 1]:.3f}" if varies else "none: one of them never varies"
        first, last = (self.samples[at]["iteration"] for at in (0, -1))
        rows = [
            ("samples", f"{len(old):,} of iterations {first} to {last}"),
            ("mean", f"{old.mean():.4g} old, {new.mean():.4g} new"),
            ("standard deviation", f"{old.std():.4g} old, {new.std():.4g} new"),
            ("correlation", correlation),
            ("changed", f"{len(changed):,} samples, {len(changed) / len(old):.1%}"),
            *self._group_rows(),
            ("advantages", f"change by {gaps.mean():.3g} on average (GRPO's)"),
            ("scored in", f"{self.seconds:.1f} s"),
        ]
        if self.unscored:
            rows.insert(1, ("without a new reward", f"{len(self.unscored):,}; the first: {self.unscored[0]}"))
        if self.unread:
            rows.insert(1, ("unread", self.unread))
        lines = [f"{label:<22}{value}" for label, value in rows]
        most = sorted(changed.tolist(), key=lambda at: -abs(new[at] - old[at]))[:_SHOWN]
        for one in (self.samples[at] for at in most):
            text = visible(one["response"][:_SHOWN_CHARS])
            lines.append(f"  sample {one['sample_index']}: {one['old']:.4g} -> {one['new']:.4g}  {text!r}")
        return lines

    def write(self, file: Path) -> None:
        """Write all samples as Parquet, or as JSON lines. Raises StorageError."""
        if file.suffix == ".jsonl":
            write_whole(file, "".join(f"{json.dumps(row)}\n" for row in self.samples))
            return
        whole = BytesIO()
        pq.write_table(pa.Table.from_pylist([*self.samples]), whole, compression="zstd")
        write_whole(file, whole.getvalue())

    def _values(self, name: str) -> np.ndarray:
        return np.array([sample[name] for sample in self.samples])

    def _group_rows(self) -> Iterator[tuple[str, str]]:
        """How the order within groups changed, and which groups begin or cease to have advantages."""
        groups: dict[int, list[tuple[float, float]]] = {}
        for one in self.samples:
            groups.setdefault(one["group_id"], []).append((one["old"], one["new"]))
        num_pairs = swapped = other = reordered = began = ceased = taught = 0
        for group in groups.values():
            # of each pair of samples, which one has more
            pairs, values = np.triu_indices(len(group), 1), np.array(group).T
            old, new = (np.sign(np.subtract.outer(of_all, of_all))[pairs] for of_all in values)
            num_pairs, swapped = num_pairs + len(old), swapped + int((old * new < 0).sum())
            other, reordered = other + int((old != new).sum()), reordered + bool((old != new).any())
            taught += bool(old.any())
            began, ceased = began + bool(new.any() > old.any()), ceased + bool(old.any() > new.any())
        if not num_pairs:
            yield "groups", "none: one sample a prompt"
            return
        yield (
            "order in groups",
            f"another in {reordered:,} of {len(groups):,} groups: of {num_pairs:,} pairs {swapped:,} are swapped, "
            f"{other - swapped:,} tied or parted",
        )
        yield (
            "groups that teach",
            f"{taught:,} old, {taught + began - ceased:,} new: {began:,} begin, {ceased:,} cease",
        )


def rescore_run(
    run: RecordedRun, *, iterations: tuple[int, int] | None, tick: Callable[[str, float], None]
) -> RescoredRun:
    """Score the samples of a run, or of iterations from the one to the other, by the reward of its config.

    The run is opened with the overrides that name the reward. Raises InputError: that reward is not to be had here;
    DataError: a file cannot be read, or no sample can be scored.
    """
    files = files_of(run, iterations)
    config = run.config
    scorer = RewardsAgain(run, read_tokenizer(config.models, config.run.template_time), to_the_bit=False)
    began_s = time.perf_counter()
    samples: list[dict[str, Any]] = []
    unscored: list[str] = []
    scored: list[Reward] = []
    for number, file in enumerate(files):
        tick("scoring again", number / len(files))
        recorded = read_recorded(locations_in(file))
        rewards = scorer.of(recorded)
        scored += [reward for reward in rewards if isinstance(reward, Reward)]
        unscored += [reward.reason for reward in rewards if isinstance(reward, Unscored)]
        both = [
            (one, one.rollout.reward.value, reward.value)
            for one, reward in zip(recorded, rewards, strict=True)
            if isinstance(reward, Reward)
        ]
        groups = torch.tensor([one.rollout.completion.group_id for one, *_ in both])
        values = torch.tensor([pair for _, *pair in both]).reshape(-1, 2).T
        advantages = [group_advantages(of_all, groups).tolist() for of_all in values]
        for (one, old, new), before, after in zip(both, *advantages, strict=True):
            key, rollout = one.location.key, one.rollout
            samples.append(
                {
                    "iteration": iteration_of(file) + 1,
                    "run_seed": key.run_seed,
                    "stream": str(key.stream),
                    "sample_index": key.sample_index,
                    "group_id": rollout.completion.group_id,
                    "prompt_id": rollout.prompt.prompt_id,
                    "old": old,
                    "new": new,
                    "old_advantage": before,
                    "new_advantage": after,
                    "response": rollout.response_text,
                }
            )
    if not samples:
        why = unscored[0] if unscored else "there are none"
        raise DataError(f"none of the {len(unscored)} samples of {run.folder} can be scored again: {why}")
    spent_s = time.perf_counter() - began_s
    return RescoredRun(samples=samples, unscored=unscored, seconds=spent_s, unread=unread_line(scored))


def files_of(run: RecordedRun, iterations: tuple[int, int] | None) -> list[Path]:
    """The rollout files of a run, or of iterations from the one to the other. Raises ConfigError: there is none."""
    first, last = iterations or (1, 1 << 62)
    files = [one for one in rollout_files(run.folder) if first <= iteration_of(one) + 1 <= last]
    if not files:
        raise ConfigError(
            f"{run.folder} keeps no rollouts of iterations {first} to {last}; it has "
            f"{len(rollout_files(run.folder))} files in rollouts/: name others"
        )
    return files
