"""Draws metrics of one run or several over their iterations into one PNG."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlhfspec.cluster.folder.run_record import RunRecord
from rlhfspec.core.files import write_whole
from rlhfspec.core.metric_registry import find_metric

_COLUMNS = 3
MOST_DRAWN = 30


def write_run_picture(runs: Sequence[RunRecord], names: Sequence[str], path: Path) -> int:
    """Write a panel a metric, a curve a run; return how many metrics were drawn. Raises StorageError.

    The first `MOST_DRAWN` names that any run has; without one nothing is written.
    """
    drawn = [name for name in names if any(run.series(name)[1] for run in runs)][:MOST_DRAWN]
    if not drawn:
        return 0
    num_rows = -(-len(drawn) // _COLUMNS)
    figure = Figure(figsize=(4.2 * min(len(drawn), _COLUMNS), 2.6 * num_rows), layout="constrained")
    for place, name in enumerate(drawn, start=1):
        axes = figure.add_subplot(num_rows, min(len(drawn), _COLUMNS), place)
        for run in runs:
            # a leading underscore would hide a label
            axes.plot(*run.series(name), marker="o", markersize=2.5, linewidth=1.2, label=f" {run.name}")
        metric = find_metric(name)
        axes.set_title(name, fontsize="small", parse_math=False)
        axes.set_ylabel(metric.unit if metric else "", fontsize="small")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if place == 1 and len(runs) > 1:
            axes.legend(fontsize="x-small")
    file = BytesIO()
    figure.savefig(file, dpi=120, format="png")
    write_whole(path, file.getvalue())
    return len(drawn)
