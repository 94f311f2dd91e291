"""The reader of a run folder, finished, cut short, damaged or old: every view of a run asks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

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
    whole = [row for row in rows if key in row]
    if len(whole) < len(rows):
        note(f"{path}: {len(rows) - len(whole)} lines without '{key}' are left out")
    return whole
