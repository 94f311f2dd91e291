"""Where the marks of a page's charts stand, in percent of the drawing area: the template draws them at any width."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..observe.timeline import Interval, Lane, Timeline, merge

MOST_POINTS = 200
"Of a line; neighbours are averaged where there are more."
MOST_MARKED = 40
"Points of a line that are marked each."
MOST_LANES = 64
_MOST_COLUMNS = 600
_COLUMNS_OF_ALL_LANES = 20_000
_FULL = 100.0

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart."""

    name: str
    points: Points
    "x and y of the data, in order of x"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnLine:
    """The same, placed."""

    name: str
    polyline: str
    marks: Sequence[tuple[float, float, str]]
    "x, y and what to say of the point"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines over a common scale. y counts from the top, as in SVG."""

    title: str
    x_label: str
    described: str
    "for who cannot see it"
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    lines: Sequence[DrawnLine]


def number(value: float) -> str:
    """A value as people read it."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.3g}"


def draw(
    title: str, lines: Sequence[Line], *, x_label: str = "iteration", from_zero: bool = False
) -> Chart | None:
    """Place lines on a common scale; None where none has a point. `from_zero`: 0 is in the scale."""
    shown = [Line(name=line.name, points=_thinned(line.points)) for line in lines if line.points]
    if not shown:
        return None
    xs = [x for line in shown for x, _ in line.points]
    ys = [y for line in shown for _, y in line.points] + ([0.0] if from_zero else [])
    left, right = min(xs), max(max(xs), min(xs) + 1.0)
    y_values = ticks(min(ys), max(ys))
    bottom, top = y_values[0], y_values[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        return _share(x, left, right), _FULL - _share(y, bottom, top)

    drawn = [
        DrawnLine(
            name=line.name,
            polyline=" ".join("{},{}".format(*place(x, y)) for x, y in line.points),
            marks=[(*place(x, y), f"{x_label} {number(x)}: {line.name} {number(y)}") for x, y in line.points]
            if len(line.points) <= MOST_MARKED
            else (),
        )
        for line in shown
    ]
    return Chart(
        title=title,
        x_label=x_label,
        described=f"{title}, by {x_label}. "
        + " ".join(_described(line, x_label) for line in lines if line.points),
        x_ticks=[(_share(x, left, right), number(x)) for x in _whole_ticks(left, right)],
        y_ticks=[(_FULL - _share(y, bottom, top), number(y)) for y in y_values],
        lines=drawn,
    )


def _described(line: Line, x_label: str) -> str:
    (first_x, first), (last_x, last) = line.points[0], line.points[-1]
    values = [y for _, y in line.points]
    return (
        f"{line.name}: {number(first)} at {x_label} {number(first_x)}, {number(last)} at {number(last_x)}, "
        f"least {number(min(values))}, most {number(max(values))}."
    )


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values that enclose both, at most `most` + 1 of them."""
    high = high if high > low else low + max(abs(low), 1.0) * 1e-3
    rough = (high - low) / (most - 1)
    base = 10.0 ** math.floor(math.log10(rough))
    step = next(base * times for times in (1, 2, 5, 10) if base * times >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(at * step, 12) for at in range(first, max(last, first + 1) + 1)]


def _whole_ticks(left: float, right: float) -> list[float]:
    step = max(1, math.ceil((right - left) / 5))
    return [left + step * at for at in range(int((right - left) / step) + 1)]


def _share(value: float, low: float, high: float) -> float:
    return round(_FULL * (value - low) / (high - low), 2)


def _thinned(points: Points) -> Points:
    count = min(len(points), MOST_POINTS)
    parts = [points[at * len(points) // count : (at + 1) * len(points) // count] for at in range(count)]
    return [(part[0][0], sum(y for _, y in part) / len(part)) for part in parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnLane:
    """One instance's row."""

    name: str
    busy: str
    running: str
    "SVG path of the number of running samples, 0 to 100 upwards"
    transfers: Sequence[tuple[str, float, float]]
    "kind, left, width"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """A sample's way between two rows."""

    source: int
    destination: int
    left: float
    arrived: float
    is_shipped: bool
    "its caches came along; else they were computed again"
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineChart:
    """The lanes of one iteration's generation."""

    iteration: int
    "counted from 1"
    length_s: float
    most_samples: int
    "what the full height of a lane stands for"
    ticks: Sequence[tuple[float, str]]
    lanes: Sequence[DrawnLane]
    arrows: Sequence[Arrow]
    rows: Sequence[Sequence[str]]
    "table: instance, busy, decode steps, tokens, samples that came, samples that left"
    num_left_out: int
    "lanes beyond MOST_LANES"
    described: str


def draw_timeline(
    timeline: Timeline, *, iteration: int, recomputed: Mapping[str, str]
) -> TimelineChart | None:
    """Place the lanes; None where nothing happened.

    Args:
        timeline: of one iteration.
        iteration: counted from 1.
        recomputed: of moves whose caches were computed again, by their names.
    """
    length_s = timeline.length_s
    if length_s <= 0.0 or not any(lane.steps for lane in timeline.lanes):
        return None
    lanes = timeline.lanes[:MOST_LANES]
    most = max(1, *(step.num_samples for lane in lanes for step in lane.steps))
    columns = min(_MOST_COLUMNS, _COLUMNS_OF_ALL_LANES // len(lanes))
    places = {lane.instance: place for place, lane in enumerate(lanes)}
    arrows = [
        Arrow(
            source=places[one.source],
            destination=places[one.destination],
            left=_share(min(one.left.end_s, one.arrived.end_s), 0.0, length_s),
            arrived=_share(one.arrived.end_s, 0.0, length_s),
            is_shipped=one.move_id not in recomputed,
            what=f"move {one.move_id} from {one.source} to {one.destination} at {one.arrived.end_s:.2f} s",
        )
        for one in timeline.journeys
        if one.source in places and one.destination in places
    ]
    rows = [_row(lane, timeline) for lane in timeline.lanes]
    return TimelineChart(
        iteration=iteration,
        length_s=length_s,
        most_samples=most,
        ticks=[(_share(at, 0.0, length_s), number(at)) for at in ticks(0.0, length_s) if at <= length_s],
        lanes=[
            DrawnLane(
                name=lane.instance,
                busy=row[1],
                running=_running_path(lane.steps, length_s, most, columns),
                transfers=_bars(lane, length_s),
            )
            for lane, row in zip(lanes, rows, strict=False)
        ],
        arrows=arrows,
        rows=rows,
        num_left_out=len(timeline.lanes) - len(lanes),
        described=f"Generation of iteration {iteration}, {length_s:.2f} s, on {len(timeline.lanes)} instances, with "
        f"{len(timeline.journeys)} moves of samples. The table below has the figures of each instance.",
    )


def _row(lane: Lane, timeline: Timeline) -> list[str]:
    moved_in = sum(one.destination == lane.instance for one in timeline.journeys)
    moved_out = sum(one.source == lane.instance for one in timeline.journeys)
    tokens = sum(step.num_tokens for step in lane.steps)
    busy = f"{lane.busy_s / timeline.length_s:.0%}"
    return [lane.instance, busy, f"{len(lane.steps):,}", f"{tokens:,}", str(moved_in), str(moved_out)]


def _running_path(steps: Sequence[Interval], length_s: float, most: int, columns: int) -> str:
    """Samples that run in each column of time, the most of its decode steps; 0 where none lasts."""
    heights = [0] * columns
    for step in steps:
        first = min(int(step.begin_s / length_s * columns), columns - 1)
        last = min(int(step.end_s / length_s * columns), columns - 1)
        for column in range(first, last + 1):
            heights[column] = max(heights[column], step.num_samples)
    path, before = ["M0 100"], 0
    for column, height in enumerate(heights):
        if height != before:
            x = f"{_FULL * column / columns:.4g}"
            path.append(f"H{x}V{_FULL - _FULL * height / most:.4g}")
            before = height
    return "".join([*path, "H100V100Z"])


def _bars(lane: Lane, length_s: float) -> list[tuple[str, float, float]]:
    bars = []
    for kind, transfers in (("in", lane.receives), ("out", lane.sends)):
        for begin_s, end_s in merge(transfers, gap_s=length_s / _MOST_COLUMNS):
            left = _share(begin_s, 0.0, length_s)
            bars.append((kind, left, max(0.2, _share(end_s, 0.0, length_s) - left)))
    return bars
