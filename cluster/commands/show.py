"""`rlhfspec show`: draws a run folder, finished or not, or compares several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...core.errors import ConfigError
from .declare import Arg

if TYPE_CHECKING:
    from ..observe.console import Reporter
    from ..observe.run_record import RunRecord


def show(
    run_dirs: Annotated[
        Sequence[Path], Arg("RUN_DIR", "folder that the run printed first; several are compared")
    ],
    *,
    metric: Annotated[
        list[str],
        Arg("NAME", "show this metric, or those of a pattern such as 'learner/*'; may be repeated"),
    ],
    samples: Annotated[bool, Arg(help="print a few samples of an iteration")] = False,
    iteration: Annotated[int, Arg("N", "whose samples, counted from 1; the last by default")] | None = None,
    as_json: Annotated[bool, Arg(help="print one JSON object and nothing else", flag="--json")] = False,
) -> int:
    """Draw a run, or compare several.

    Print what a run achieved, from its folder alone: state, summary, curves, histograms. Several runs stand side by
    side. Of a damaged folder it prints what can be read.

      rlhfspec show runs/demo-20260101-120000
      rlhfspec show runs/a runs/b --metric 'reward/*'
      rlhfspec show runs/a --samples --iteration 12
    """
    from ..observe.console import Reporter
    from ..observe.run_record import RunRecord
    from ..observe.show_tables import run_tree, shown_names

    report = Reporter()
    notes: list[str] = []
    runs = [RunRecord.read(path, notes.append) for path in run_dirs]
    names = shown_names(runs, metric)
    if metric and not names:
        raise ConfigError(
            f"no metric of {', '.join(run.name for run in runs)} is called {', '.join(metric)}; they have "
            f"{', '.join(sorted({name for run in runs for name in run.names()})) or 'none'}"
        )
    if as_json:
        print(json.dumps({"runs": [run_tree(run, names) for run in runs], "notes": notes}))
        return 0
    if samples:
        for one in runs:
            report.console.print(_samples(one, iteration), markup=False)
    elif len(runs) > 1:
        _compare(runs, names, report)
    else:
        _show(runs[0], names, report)
    for note in notes:
        report.note(note)
    return 0


def _show(one: RunRecord, names: list[str], report: Reporter) -> None:
    from ..folder.iteration_logs import read_histograms
    from ..observe.show_tables import curves_table, histogram_table
    from ..resume.changed_keys import describe_run

    for line in describe_run(one.run_dir):
        report.note(line)
    if any(one.series(name)[1] for name in names):
        report.console.print(curves_table(one, names))
    histograms = read_histograms(one.run_dir.histograms_file)
    if histograms and histograms[-1][1]:
        report.console.print(histogram_table(*histograms[-1]))
    report.finish(one.rows, one.run_dir)


def _compare(runs: list[RunRecord], names: list[str], report: Reporter) -> None:
    from ..folder.run_status import describe_status
    from ..observe.show_tables import comparison_table

    for one in runs:
        report.note(f"{one.name}: {describe_status(one.run_dir.status())[0]}")
    report.console.print(comparison_table(runs, names))


def _samples(one: RunRecord, iteration: int | None) -> str:
    """The sample table of one iteration, counted from 1, or of the last whose rollouts can be read."""
    from ...core.errors import DataError
    from ..folder.rollouts import locations_in, read_recorded, rollout_files
    from ..folder.sample_table import SampleRow, as_markdown, choose_samples

    if iteration is not None:
        files = [one.run_dir.rollouts_file(iteration - 1)] if iteration > 0 else []
    else:
        files = rollout_files(one.run_dir.path)[::-1]
    faults = []
    for file in files:
        try:
            rows = [SampleRow.of(each.rollout, each.advantage) for each in read_recorded(locations_in(file))]
        except DataError as error:
            faults.append(str(error))
            continue
        number = int(file.stem.rpartition("_")[2])
        title = f"{one.name}, iteration {number + 1}"
        return as_markdown(title, choose_samples(rows, 8, seed=number))
    asked = f"of iteration {iteration}" if iteration is not None else "in its rollouts folder"
    raise ConfigError(
        f"{one.run_dir.path} has no samples {asked} that can be read; expected rollouts/iteration_0000.parquet and the "
        f"like{'; ' + faults[0] if faults else ''}"
    )
