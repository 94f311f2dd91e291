"""Where the marks of a page's charts stand, in percent of the drawing area: the template draws them at any width."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..observe.timeline import Event, Stretches, Trace, end_s, merge, stretches

MOST_POINTS = 200
"Of a line; neighbours are averaged where there are more."
MOST_MARKED = 40
"Points of a line that are marked each."
MOST_LANES = 64
_MOST_COLUMNS = 600
_COLUMNS_OF_ALL_LANES = 20_000
_FULL = 100.0

Points = Sequence[tuple[float, float]]
"x and y of the data, in order of x."


def number(value: float) -> str:
    """A value as people read it."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.3g}"


def draw(
    title: str, lines: Mapping[str, Points], *, x_label: str = "iteration", from_zero: bool = False
) -> dict[str, Any] | None:
    """Lines on a common scale, as the template draws them; None where none has a point.

    y counts from the top, as in SVG; a mark is x, y and what to say of the point. `from_zero`: 0 is in the scale.
    """
    shown = {name: _thinned(points) for name, points in lines.items() if points}
    if not shown:
        return None
    xs = [x for points in shown.values() for x, _ in points]
    ys = [y for points in shown.values() for _, y in points] + ([0.0] if from_zero else [])
    left, right = min(xs), max(max(xs), min(xs) + 1.0)
    y_values = ticks(min(ys), max(ys))
    bottom, top = y_values[0], y_values[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        return _share(x, left, right), _FULL - _share(y, bottom, top)

    return {
        "title": title,
        "x_label": x_label,
        # for who cannot see it
        "described": f"{title}, by {x_label}. "
        + " ".join(_described(name, points, x_label) for name, points in lines.items() if points),
        "x_ticks": [
            (_share(left + x, left, right), number(left + x))
            for x in range(0, int(right - left) + 1, max(1, math.ceil((right - left) / 5)))
        ],
        "y_ticks": [(_FULL - _share(y, bottom, top), number(y)) for y in y_values],
        "lines": [
            {
                "name": name,
                "polyline": " ".join("{},{}".format(*place(x, y)) for x, y in points),
                "marks": [(*place(x, y), f"{x_label} {number(x)}: {name} {number(y)}") for x, y in points]
                if len(points) <= MOST_MARKED
                else [],
            }
            for name, points in shown.items()
        ],
    }


def _described(name: str, points: Points, x_label: str) -> str:
    (first_x, first), (last_x, last) = points[0], points[-1]
    values = [y for _, y in points]
    return (
        f"{name}: {number(first)} at {x_label} {number(first_x)}, {number(last)} at {number(last_x)}, "
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


def _share(value: float, low: float, high: float) -> float:
    return round(_FULL * (value - low) / (high - low), 2)


def _thinned(points: Points) -> Points:
    count = min(len(points), MOST_POINTS)
    parts = [points[at * len(points) // count : (at + 1) * len(points) // count] for at in range(count)]
    return [(part[0][0], sum(y for _, y in part) / len(part)) for part in parts]


def draw_timeline(trace: Trace, *, iteration: int, recomputed: Mapping[str, str]) -> dict[str, Any] | None:
    """What the template draws of one iteration's instances, a lane each; None where nothing happened.

    Args:
        trace: of the iteration.
        iteration: counted from 1.
        recomputed: of moves whose caches were computed again, by their names.
    """
    length_s, lanes, moves = trace.length_s, trace.lanes(), trace.moves
    steps = {name: [one for one in lane if one["cat"] == "step"] for name, lane in lanes.items()}
    if length_s <= 0.0 or not any(steps.values()):
        return None
    shown = list(lanes)[:MOST_LANES]
    most = max(1, *(one["args"]["samples"] for name in shown for one in steps[name]))
    columns = min(_MOST_COLUMNS, _COLUMNS_OF_ALL_LANES // len(shown))
    busy = {
        name: sum(end - begin for begin, end in merge(stretches(lane, "step", "attach"))) / length_s
        for name, lane in lanes.items()
    }
    names = trace.instances
    ways = [(names[left["pid"]], names[arrived["pid"]]) for _, left, arrived in moves]
    return {
        "iteration": iteration,
        # what the full height of a lane stands for
        "most_samples": most,
        "ticks": [(_share(at, 0.0, length_s), number(at)) for at in ticks(0.0, length_s) if at <= length_s],
        "lanes": [
            {
                "name": name,
                "busy": f"{busy[name]:.0%}",
                "running": _running_path(steps[name], length_s, most, columns),
                "transfers": [
                    *_bars("in", stretches(lanes[name], "receive"), length_s),
                    *_bars("out", stretches(lanes[name], "send"), length_s),
                ],
            }
            for name in shown
        ],
        "arrows": [
            {
                "source": shown.index(source),
                "destination": shown.index(destination),
                "left": _share(min(end_s(left), end_s(arrived)), 0.0, length_s),
                "arrived": _share(end_s(arrived), 0.0, length_s),
                "is_shipped": move_id not in recomputed,
                "what": f"move {move_id} from {source} to {destination} at {end_s(arrived):.2f} s",
            }
            for (source, destination), (move_id, left, arrived) in zip(ways, moves, strict=True)
            if source in shown and destination in shown
        ],
        "rows": [
            [
                name,
                f"{busy[name]:.0%}",
                f"{len(steps[name]):,}",
                f"{sum(one['args']['tokens'] for one in steps[name]):,}",
                str(sum(destination == name for _, destination in ways)),
                str(sum(source == name for source, _ in ways)),
            ]
            for name in lanes
        ],
        "num_left_out": len(lanes) - len(shown),
        "described": f"Generation of iteration {iteration}, {length_s:.2f} s, on {len(lanes)} instances, with "
        f"{len(moves)} moves of samples. The table below has the figures of each instance.",
    }


def _running_path(steps: Sequence[Event], length_s: float, most: int, columns: int) -> str:
    """Samples that run in each column of time, the most of its decode steps; 0 where none lasts."""
    heights = [0] * columns
    for step in steps:
        first = min(int(step["ts"] / 1e6 / length_s * columns), columns - 1)
        last = min(int(end_s(step) / length_s * columns), columns - 1)
        for column in range(first, last + 1):
            heights[column] = max(heights[column], step["args"]["samples"])
    path, before = ["M0 100"], 0
    for column, height in enumerate(heights):
        if height != before:
            x = f"{_FULL * column / columns:.4g}"
            path.append(f"H{x}V{_FULL - _FULL * height / most:.4g}")
            before = height
    return "".join([*path, "H100V100Z"])


def _bars(kind: str, transfers: Stretches, length_s: float) -> list[tuple[str, float, float]]:
    """Kind, left, width."""
    bars = []
    for begin, end in merge(transfers, gap_s=length_s / _MOST_COLUMNS):
        left = _share(begin, 0.0, length_s)
        bars.append((kind, left, max(0.2, _share(end, 0.0, length_s) - left)))
    return bars
