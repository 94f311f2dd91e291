"""The pictures of the README and of the pages, as SVG: equal figures give an equal file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

DRAFTS = {"": "trained draft", "_weak": "weak draft", "_useless": "useless draft"}
BATCHES = (1, 4, 8, 16, 32)


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


def _save(chart: Figure, path: Path) -> None:
    # a fixed salt and no date: equal figures give an equal file; text stays text, so that a test can read it
    with matplotlib.rc_context({"svg.hashsalt": "rlhfspec", "svg.fonttype": "none"}):
        chart.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
