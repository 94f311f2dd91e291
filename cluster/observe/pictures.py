"""Pictures: a run's progress, metrics of several runs, a timeline, a profile, a sweep of simulated clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from rlhfspec.cluster.observe.run_tables import RunRecord
from rlhfspec.cluster.observe.summary import STEP_PARTS
from rlhfspec.cluster.observe.timeline import Interval, Lane, Timeline, merge
from rlhfspec.core.files import write_whole
from rlhfspec.core.metrics import find_metric
from rlhfspec.policies.reallocation.pool_records import MoveMode

if TYPE_CHECKING:
    from rlhfspec.engine.calibration.profiler import MadeProfile
    from rlhfspec.policies.simulate.sweep import Tried
    from rlhfspec.profiles.cost import CostModel, CostTable, Shape


def _save(figure: Figure, path: Path) -> None:
    """Write it whole, as the file's ending says; an SVG the same to the byte each time. Raises StorageError."""
    file, is_svg = BytesIO(), path.suffix == ".svg"
    with matplotlib.rc_context({"svg.hashsalt": "rlhfspec", "svg.fonttype": "none"}):
        metadata = {"Date": None, "Creator": None} if is_svg else None
        figure.savefig(file, dpi=120, format=path.suffix.lstrip("."), metadata=metadata)
    write_whole(path, file.getvalue())


def write_picture(metrics: Sequence[Mapping[str, float]], path: Path) -> None:
    """Write the picture of the lines of `metrics.jsonl`; without any line, write nothing. Raises StorageError."""
    if not metrics:
        return
    figure = Figure(figsize=(8, 8), layout="constrained")
    reward, acceptance, time = figure.subplots(3, 1, sharex=True)
    iterations = [row["iteration"] + 1 for row in metrics]
    _draw_reward(reward, iterations, metrics)
    _draw_acceptance(acceptance, iterations, metrics)
    _draw_time(time, iterations, metrics)
    _save(figure, path)


def _column(metrics: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [row.get(name, float("nan")) for row in metrics]


def _draw_reward(axes: Axes, iterations: list[float], metrics: Sequence[Mapping[str, float]]) -> None:
    axes.plot(iterations, _column(metrics, "reward/mean"), marker="o", markersize=3, label="mean reward")
    if any("reward/accuracy" in row for row in metrics):
        axes.plot(iterations, _column(metrics, "reward/accuracy"), linestyle="--", label="accuracy")
    axes.set_ylabel("reward")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)


def _draw_acceptance(axes: Axes, iterations: list[float], metrics: Sequence[Mapping[str, float]]) -> None:
    lengths = _column(metrics, "rollout/mean_acceptance_length")
    axes.plot(iterations, lengths, marker="o", markersize=3, color="tab:green")
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes.set_ylabel("acceptance length\n(tokens a decode step)")
    axes.grid(alpha=0.3)


def _draw_time(axes: Axes, iterations: list[float], metrics: Sequence[Mapping[str, float]]) -> None:
    bottom = [0.0] * len(metrics)
    for part in STEP_PARTS:
        seconds = [row.get(f"time/{part}_s", 0.0) for row in metrics]
        axes.bar(iterations, seconds, bottom=bottom, label=part)
        bottom = [below + height for below, height in zip(bottom, seconds, strict=True)]
    total = [row.get("time/iteration_s", 0.0) for row in metrics]
    rest = [max(0.0, whole - below) for whole, below in zip(total, bottom, strict=True)]
    axes.bar(iterations, rest, bottom=bottom, label="other", color="lightgrey")
    axes.set_ylabel("seconds an iteration")
    axes.set_xlabel("iteration")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    above = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "frameon": False}
    axes.legend(ncols=len(STEP_PARTS) + 1, fontsize="small", **above)


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
    _save(figure, path)
    return len(drawn)


MOST_ROWS = 40
"The shortest steps; more are no picture."


def draw_sweep(rows: Sequence[Tried], path: Path) -> None:
    """Draw the step of every combination and its rollout, the best one marked. Raises StorageError.

    The file's ending says the form: .png, .svg, .pdf.
    """
    from rlhfspec.policies.simulate.sweep import best

    done = sorted(
        ((row.result.speculative.step_s, row) for row in rows if row.result), key=lambda pair: pair[0]
    )
    shown = [row for _, row in done[:MOST_ROWS]][::-1]
    chosen = best(rows)
    figure = Figure(figsize=(8, 1.2 + 0.28 * max(len(shown), 1)), layout="constrained")
    axes = figure.subplots()
    places = range(len(shown))
    steps = [row.result.speculative.step_s if row.result else 0.0 for row in shown]
    rollouts = [row.result.speculative.rollout_s if row.result else 0.0 for row in shown]
    colours = ["tab:green" if row is chosen else "tab:blue" for row in shown]
    axes.barh(places, steps, color=colours, label="step")
    axes.plot(
        rollouts, places, linestyle="none", marker="|", color="black", markersize=10, label="its rollout"
    )
    for place, seconds in zip(places, steps, strict=True):
        axes.annotate(f"{seconds:.1f} s", (seconds, place), (3, -3), textcoords="offset points", fontsize=7)
    axes.set_yticks(places, [row.label + ("  (best)" if row is chosen else "") for row in shown], fontsize=7)
    axes.set_xlabel("seconds a step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0.0, 1.12 * max(steps, default=1.0))
    axes.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)
    _save(figure, path)


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
    _save(draw_timeline(timeline, title=title), path)


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


KNEE = 2.0
"Where verification costs this many times one token of every sample."


def draw_profile(made: MadeProfile, folder: Path) -> list[Path]:
    """Write `verify_cost.png` and, where something drafts, `acceptance.png`; return their paths.

    Time against tokens verified, with the knee; and how reliable the acceptance model is.
    """
    pictures = [(_draw_cost(made), folder / "verify_cost.png")]
    if made.drafts:
        pictures.append((_draw_reliability(made), folder / "acceptance.png"))
    for figure, path in pictures:
        _save(figure, path)
    return [path for _, path in pictures]


def _draw_cost(made: MadeProfile) -> Figure:
    figure = Figure(figsize=(7, 4.5), layout="tight")
    axes = figure.subplots()
    for number, batch in enumerate(np.unique(np.asarray(made.costs.shape.num_samples))):
        color = f"C{number}"
        rows = made.costs.where(np.asarray(made.costs.shape.num_samples) == batch)
        tokens = np.asarray(rows.shape.num_nodes) + batch
        axes.scatter(tokens, rows.verify_s * 1e3, s=6, color=color, alpha=0.5)
        axes.plot(*_curve(made.profile.cost, rows, float(batch)), color=color, label=f"B={batch:g}")
    axes.axvline(knee_tokens(made.profile.cost, made.costs), color="grey", linestyle=":", label="knee")
    axes.set(xlabel="tokens verified", ylabel="ms", xscale="log", yscale="log", title="target forward")
    axes.legend(fontsize=7)
    return figure


def _draw_reliability(made: MadeProfile) -> Figure:
    from rlhfspec.profiles.quality import predict, reliability
    from rlhfspec.profiles.recording import join_nodes

    nodes = join_nodes([draft.nodes() for draft in made.drafts])
    figure = Figure(figsize=(4.5, 4.5), layout="tight")
    axes = figure.subplots()
    for rank, label in ((1, "first choice"), (2, "second choice")):
        some = nodes.where(nodes.rank == rank)
        if len(some):
            points = reliability(predict(made.profile.acceptance, some), some.accepted, 12)
            axes.plot([p for p, _, _ in points], [a for _, a, _ in points], "o-", label=label)
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axes.set(xlabel="estimated acceptance", ylabel="accepted", title="reliability")
    axes.legend()
    return figure


def knee_tokens(cost: CostModel, table: CostTable) -> float:
    """Tokens of one sample at which a target forward costs KNEE times that of one token."""
    context = float(np.median(np.asarray(table.shape.context_tokens) / np.asarray(table.shape.num_samples)))
    tokens = np.arange(1, 2049)
    seconds = cost.verify_s(_chain(1.0, context, tokens - 1.0))
    beyond = np.nonzero(seconds > KNEE * seconds[0])[0]
    return float(tokens[beyond[0]]) if len(beyond) else float(tokens[-1])


def _curve(cost: CostModel, rows: CostTable, batch: float) -> tuple[np.ndarray, np.ndarray]:
    nodes = np.arange(0, np.asarray(rows.shape.widest).max() + 1)
    context = float(np.median(np.asarray(rows.shape.context_tokens)))
    return batch * (nodes + 1), cost.verify_s(_chain(batch, context, nodes)) * 1e3


def _chain(batch: float, context: float, nodes: np.ndarray) -> Shape:
    from rlhfspec.profiles.cost import Shape

    return Shape(
        num_samples=batch,
        context_tokens=context,
        num_nodes=batch * nodes,
        widest=nodes,
        levels=nodes,
        width=1.0,
    )
