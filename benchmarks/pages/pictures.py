"""The pictures of the README and of the pages, as SVG: equal figures give an equal file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

DRAFTS = {"": "trained draft", "_weak": "weak draft", "_useless": "useless draft"}
BATCHES = (1, 4, 8, 16, 32)
BUDGET_TOKENS = 36_000
"That `drafter make` takes by itself."


def draw_speedup(path: Path, result: Mapping[str, Any]) -> None:
    """Draw the best fixed plan over plain decoding for each draft and batch, with 95% intervals, as SVG."""
    figures, intervals = result["figures"], result["intervals"]
    chart = Figure(figsize=(6, 2.6), layout="constrained")
    axes = chart.subplots()
    for suffix, label in DRAFTS.items():
        names = {batch: f"spec_over_plain_b{batch}{suffix}" for batch in BATCHES}
        names = {BATCHES.index(batch): name for batch, name in names.items() if name in figures}
        heights = [figures[name] for name in names.values()]
        axes.plot(list(names), heights, marker="o", label=label)
        axes.vlines(
            list(names), *zip(*(intervals[name] for name in names.values()), strict=True), colors="gray"
        )
        for place, height in zip(names, heights, strict=True):
            axes.annotate(
                f"{height:.2f}x",
                (place, height),
                (5, 4 if height > 1.0 else -10),
                textcoords="offset points",
                fontsize=8,
            )
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--", label="plain decoding")
    axes.set_xticks(range(len(BATCHES)), [f"batch {batch}" for batch in BATCHES])
    axes.set_ylabel("speed-up")
    axes.set_ylim(bottom=0)
    axes.set_xlim(-0.2, len(BATCHES) - 0.5)
    axes.legend(fontsize=8, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    _save(chart, path)


def draw_learning_curve(path: Path, result: Mapping[str, Any]) -> None:
    """Draw tokens a step of heads over the own tokens that they were made from, as SVG."""
    figures = result["figures"]
    points = sorted(int(name.rsplit("_", 1)[1]) for name in figures if name.startswith("tree_length_"))
    chart = Figure(figsize=(6, 2.6), layout="constrained")
    axes = chart.subplots()
    for kind, label in (("tree", "trees of 8 nodes"), ("chain", "chains of 4")):
        heights = [figures[f"{kind}_length_{point}"] for point in points]
        axes.plot(points, heights, marker="o", label=label)
        for point, height in zip(points, heights, strict=True):
            axes.annotate(f"{height:.2f}", (point, height), (0, 5), textcoords="offset points", fontsize=8)
    axes.axvline(BUDGET_TOKENS, color="gray", linewidth=0.8, linestyle="--", label="15 minutes on two cores")
    axes.set_xscale("log", base=2)
    axes.set_xticks(points, [f"{point:,}" for point in points])
    axes.set_xlabel("own tokens that the head was made from")
    axes.set_ylabel("tokens a step")
    axes.set_ylim(bottom=1.0)
    axes.legend(fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    _save(chart, path)


def _save(chart: Figure, path: Path) -> None:
    # a fixed salt and no date: equal figures give an equal file; text stays text, so that a test can read it
    with matplotlib.rc_context({"svg.hashsalt": "rlhfspec", "svg.fonttype": "none"}):
        chart.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
