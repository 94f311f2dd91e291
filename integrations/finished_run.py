"""What Python gets of a run, finished or not: tables, the page, the weights, all read from its folder."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError

_SHOWN_ROWS = 60
"Of a table in a notebook: the last."

_SHOWN_BESIDE = 6
"Rows of metrics in a text, side by side."


@dataclass(frozen=True)
class Table:
    """Rows; `table["reward/mean"]` is a column as a list, None where a row has no value."""

    rows: Sequence[Mapping[str, Any]]

    @property
    def columns(self) -> list[str]:
        """Names, in the order in which rows have them."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> list[Any]:
        if column not in self.columns:
            raise KeyError(f"{column}; there are {', '.join(self.columns)}")
        return [row.get(column) for row in self.rows]

    def __repr__(self) -> str:
        from ..cluster.observe.show_tables import SHOWN

        usual = [name for name in ("iteration", *SHOWN) if name in self.columns]
        if len(usual) < 2:  # no table of metrics
            return f"{len(self)} rows of {', '.join(self.columns)}"
        lines = [f"{len(self)} rows, {len(self.columns)} columns (.columns); of the last {_SHOWN_BESIDE}:"]
        for name in usual:
            cells = ["" if one is None else f"{one:.4g}" for one in self[name][-_SHOWN_BESIDE:]]
            lines.append(f"{name:31}" + "".join(f"{cell:>11}" for cell in cells))
        return "\n".join(lines)

    def to_pandas(self) -> Any:
        """A pandas.DataFrame. Raises ImportError where pandas is not installed."""
        return importlib.import_module("pandas").DataFrame(list(self.rows), columns=self.columns)

    def _repr_html_(self) -> str:
        shown = [
            self.columns,
            *([row.get(name) for name in self.columns] for row in self.rows[-_SHOWN_ROWS:]),
        ]
        texts = [[f"{cell:.5g}" if isinstance(cell, float) else str(cell) for cell in row] for row in shown]
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in texts)
        return f"<table>{rows}</table><p>{len(shown) - 1} of {len(self)} rows</p>"


@dataclass(frozen=True)
class Page:
    """A file of HTML, which a notebook shows in a frame."""

    path: Path

    def _repr_html_(self) -> str:
        page = escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" width="100%" height="800"></iframe>'


class Run:
    """A run folder, also of the command line: `rlhfspec.Run("runs/demo-20260101-120000")`."""

    def __init__(self, path: str | Path) -> None:
        """Raises ConfigError: no run folder."""
        from ..cluster.folder.layout import RunDir

        self._folder = RunDir.open(path)
        self.path = self._folder.path
        "absolute"

    def __repr__(self) -> str:
        return f"Run('{self.path}'), {self._folder.status()['state']}"

    @property
    def metrics(self) -> Table:
        """A row an iteration, its number counted from 1; of a supervised run a row a step, step 0 before the first."""
        from ..cluster.observe.run_record import RunRecord

        record = RunRecord.read(self.path, print)
        first = 0 if record.summary is None else 1
        return Table([{**row, "iteration": int(row["iteration"]) + first} for row in record.metrics])

    def samples(self, iteration: int | None = None) -> Table:
        """Prompt, response, reward and more of an iteration's samples; counted from 1, None: the last.

        Raises ConfigError: the run has none; DataError: they cannot be read.
        """
        from ..cluster.folder.rollouts import iteration_of, locations_in, read_recorded, rollout_files
        from ..cluster.folder.sample_table import SampleRow

        files = {iteration_of(file) + 1: file for file in rollout_files(self.path)}
        file = files.get(max(files, default=0) if iteration is None else iteration)
        if file is None:
            which = "samples" if iteration is None else f"samples of iteration {iteration}"
            raise ConfigError(
                f"{self.path} has no {which}; it has those of {[*files] or 'none: only runs of RL sample'}"
            )
        found = read_recorded(locations_in(file))
        return Table([SampleRow.of(one.rollout, one.advantage).columns for one in found])

    def report(self, out: str | Path | None = None) -> Page:
        """The page of `rlhfspec report`, in RUN-report.html of the current folder or `out`. Raises DataError."""
        from ..cluster.report.page import write_report

        return Page(write_report(self._folder, None, None if out is None else Path(out)))

    @property
    def checkpoint(self) -> Path:
        """The folder of the trained weights and their tokenizer. Raises ConfigError: none is written yet."""
        for name in ("target", "model"):
            if (folder := self._folder.checkpoint_dir(name)).is_dir():
                return folder
        how = f"go on with rlhfspec.resume({str(self.path)!r})"
        has_state = any(self._folder.checkpoints_folder.glob("state_*"))
        raise ConfigError(
            f"{self} holds no trained weights, which a run writes at its end; "
            f"{how if has_state else 'it keeps no state to go on from; train anew'}"
        )

    def model(self, **settings: Any) -> Any:
        """The trained weights: `AutoModelForCausalLM.from_pretrained(run.checkpoint, **settings)`."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.checkpoint, **settings)
