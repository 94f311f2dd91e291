"""Draws `progress.png`: reward, acceptance length and step-time breakdown per iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlhfspec.cluster.reporting.summary import STEP_PARTS
from rlhfspec.core.files import write_whole


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
    file = BytesIO()
    figure.savefig(file, dpi=120, format="png")
    write_whole(path, file.getvalue())


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
