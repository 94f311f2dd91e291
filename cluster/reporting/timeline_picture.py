"""Draws a timeline: one lane an instance, its decode steps by batch size, transfers out and in, moves as arrows."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from rlhfspec.cluster.reporting.timeline import Interval, Lane, Timeline, merge
from rlhfspec.core.files import write_whole
from rlhfspec.policies.reallocation.pool_records import MoveMode

_COLORS = {
    "idle": "#eeeeee",
    "busy": "#aecbe8",
    "samples": "tab:blue",
    "receive": "tab:green",
    "send": "tab:orange",
}
_DECODE, _RECEIVE, _SEND = (-0.2, 0.4), (-0.34, 0.12), (0.22, 0.12)
"(offset, height) within a lane, from its middle downwards; an instance's lane is 1 high"
_MAX_HEIGHT_INCHES = 40.0
_RESOLUTION = 2000
"Details shorter than this part of the picture are drawn together."


def write_timeline_picture(timeline: Timeline, path: Path, *, title: str = "") -> None:
    """Write the picture as PNG. Raises StorageError."""
    file = BytesIO()
    draw_timeline(timeline, title=title).savefig(file, dpi=120, format="png")
    write_whole(path, file.getvalue())


def draw_timeline(timeline: Timeline, *, title: str = "") -> Figure:
    """Draw the lanes in their order, the first at the top."""
    height = min(1.4 + 0.7 * len(timeline.lanes), _MAX_HEIGHT_INCHES)
    figure = Figure(figsize=(11, height), layout="constrained")
    axes = figure.subplots()
    most = max((step.num_samples for lane in timeline.lanes for step in lane.steps), default=1)
    for row, lane in enumerate(timeline.lanes):
        _draw_lane(axes, row, lane, timeline.length_s, max(most, 1))
    rows = {lane.instance: row for row, lane in enumerate(timeline.lanes)}
    for journey in timeline.journeys:
        is_shipped = journey.record is None or journey.record.order.mode is MoveMode.MIGRATE
        axes.annotate(
            "",
            xy=(journey.arrived.end_s, rows[journey.destination]),
            xytext=(min(journey.left.end_s, journey.arrived.end_s), rows[journey.source]),
            arrowprops={
                "arrowstyle": "->",
                "linewidth": 0.8,
                "linestyle": "-" if is_shipped else "--",
                "color": "black",
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
    axes.set(xlabel="s", title=title, xlim=(0.0, timeline.length_s or 1.0))
    axes.set_ylim(max(len(timeline.lanes), 1) - 0.5, -0.5)
    axes.set_yticks(range(len(timeline.lanes)), [_label(lane, timeline) for lane in timeline.lanes])
    _explain(figure, most, timeline)
    return figure


def _draw_lane(axes: Axes, row: int, lane: Lane, length_s: float, most: int) -> None:
    gap_s = length_s / _RESOLUTION
    offset, height = _DECODE
    axes.broken_barh([(0.0, length_s)], (row + offset, height), facecolors=_COLORS["idle"])
    busy = merge((*lane.steps, *lane.attaches), gap_s=gap_s)
    axes.broken_barh(_bars(busy), (row + offset, height), facecolors=_COLORS["busy"])
    times, counts = _batch_sizes(lane.steps, gap_s)
    bottom = row + offset + height
    tops = [bottom - height * count / most for count in counts]
    axes.fill_between(times, bottom, tops, color=_COLORS["samples"], linewidth=0)
    for kind, transfers, place in (("receive", lane.receives, _RECEIVE), ("send", lane.sends, _SEND)):
        bars = _bars(merge(transfers, gap_s=gap_s))
        axes.broken_barh(bars, (row + place[0], place[1]), facecolors=_COLORS[kind])


def _bars(covered: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(begin_s, end_s - begin_s) for begin_s, end_s in covered]


def _batch_sizes(steps: Sequence[Interval], gap_s: float) -> tuple[list[float], list[int]]:
    """Corners of the number of running samples over time: 0 where no decode step lasts."""
    times: list[float] = []
    counts: list[int] = []
    for step in steps:
        if times and step.begin_s - times[-1] <= gap_s:
            if counts[-1] == step.num_samples:
                times[-1] = step.end_s
                continue
        else:
            times += [times[-1], step.begin_s] if times else [step.begin_s]
            counts += [0, 0] if counts else [0]
        times += [step.begin_s, step.end_s]
        counts += [step.num_samples, step.num_samples]
    return times, counts


def _label(lane: Lane, timeline: Timeline) -> str:
    share = lane.busy_s / timeline.length_s if timeline.length_s else 0.0
    return f"{lane.instance}\n{share:.0%} busy"


def _explain(figure: Figure, most: int, timeline: Timeline) -> None:
    named = {
        "idle": "idle",
        "busy": "busy",
        "samples": f"running samples (full height: {most})",
        "receive": "transfer in",
        "send": "transfer out",
    }
    handles: list[Patch | Line2D] = [Patch(color=_COLORS[name], label=text) for name, text in named.items()]
    if timeline.journeys:
        handles.append(Line2D([], [], color="black", linewidth=0.8, label="move (dashed: recomputed)"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), fontsize="small", frameon=False
    )
