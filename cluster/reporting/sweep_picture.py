"""Draws a sweep of simulated clusters: the step of every combination and its rollout, the best one marked."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure

from rlhfspec.core.files import write_whole
from rlhfspec.policies.simulate.sweep import Tried, best

MOST_ROWS = 40
"The shortest steps; more are no picture."


def draw_sweep(rows: Sequence[Tried], path: Path) -> None:
    """Write the picture, as the file's ending says (.png, .svg, .pdf). Raises StorageError."""
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
    file = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "rlhfspec", "svg.fonttype": "none"}):
        metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        figure.savefig(file, dpi=120, format=path.suffix.lstrip("."), metadata=metadata)
    write_whole(path, file.getvalue())
