"""The reader of a run folder, finished, cut short, damaged or old: every view of a run asks it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ...core.files import write_whole
from ...core.metrics import read_metrics
from ..folder.layout import RunDir
from .summary import Summary, summarise, supervised_rows

Rows = Sequence[dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Lines of `metrics.jsonl` and `evaluations.jsonl`."""

    run_dir: RunDir
    metrics: Rows
    evaluations: Rows

    @classmethod
    def read(cls, path: str | Path, note: Callable[[str], None]) -> RunRecord:
        """Read a folder; `note` is told of lines that are left out. Raises ConfigError when it is no run folder."""
        run_dir = RunDir.open(path)
        return cls(
            run_dir=run_dir,
            metrics=_lines(run_dir.metrics_file, "iteration", note),
            evaluations=_lines(run_dir.evaluations_file, "num_iterations", note),
        )

    @property
    def summary(self) -> Summary | None:
        """What it achieved; None where no iteration of RLHF has finished."""
        return summarise(self.metrics)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The closing table, of supervised training too; none where nothing has finished."""
        summary = self.summary
        return supervised_rows(self.metrics) if summary is None else summary.rows()

    @property
    def name(self) -> str:
        """The folder's."""
        return self.run_dir.path.name

    def names(self, patterns: Sequence[str] = ("*",)) -> list[str]:
        """Metrics of this run that fit one of the patterns, by name."""
        found = {name for row in (*self.metrics, *self.evaluations) for name in row if "/" in name}
        return sorted(name for name in found if any(fnmatchcase(name, pattern) for pattern in patterns))

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Finished iterations and values of one metric, where it was set."""
        if name.startswith("eval/") and self.evaluations:
            pairs = [(row["num_iterations"], row[name]) for row in self.evaluations if name in row]
        else:
            pairs = [(row["iteration"] + 1, row[name]) for row in self.metrics if name in row]
        return [at for at, _ in pairs], [value for _, value in pairs]

    def last_fifth(self, name: str) -> float | None:
        """Mean over the last fifth of the iterations, or of the evaluations; None where it was not set."""
        _, values = self.series(name)
        last = values[-max(1, len(values) // 5) :]
        return sum(last) / len(last) if last else None


def _lines(path: Path, key: str, note: Callable[[str], None]) -> Rows:
    if not path.is_file():
        return []
    rows = read_metrics(path, note=note)
    # no clock gives seconds below 0; those of moves may be between the clocks of two machines
    clocked = re.compile(r"(?!moves/).*_s")
    whole = [r for r in rows if key in r and all(r[name] >= 0.0 for name in filter(clocked.fullmatch, r))]
    if len(whole) < len(rows):
        note(f"{path}: {len(rows) - len(whole)} lines without '{key}', or of seconds below 0, are left out")
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The last batch beside the same one, decoded plainly and bound statically; all tokens were equal.

    Of one iteration, counted from 0.
    """

    iteration: int
    num_samples: int
    num_tokens: int
    rollout_s: float
    "of the run"
    step_s: float
    "of the run: its whole iteration, evaluation left out"
    plain_rollout_s: float
    plain_step_s: float
    "the run's iteration with the plain rollout in the place of its own, and no refit of a draft"

    @property
    def rollout_gain(self) -> float:
        """How many times as fast the rollout was."""
        return self.plain_rollout_s / max(self.rollout_s, 1e-9)

    @property
    def step_gain(self) -> float:
        """How many times as fast the step was."""
        return self.plain_step_s / max(self.step_s, 1e-9)

    @property
    def text(self) -> str:
        """One line."""
        return (
            f"iteration {self.iteration + 1} plain and static: rollout {self.plain_rollout_s:.1f} s, here "
            f"{self.rollout_s:.1f} ({self.rollout_gain:.2f} times as fast); step {self.plain_step_s:.1f} s, here "
            f"{self.step_s:.1f} ({self.step_gain:.2f}); all {self.num_tokens:,} tokens equal"
        )

    def write(self, file: Path) -> None:
        """Write it as JSON. Raises StorageError."""
        write_whole(file, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, file: Path) -> Comparison | None:
        """What `write` wrote; None where there is none, or another thing."""
        try:
            tree = json.loads(file.read_bytes())
            numbers: dict[str, Any] = {
                name: (int if kind == "int" else float)(tree[name])
                for name, kind in cls.__annotations__.items()
            }
            return cls(**numbers)
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None
