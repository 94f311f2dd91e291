"""The README's picture: rollout speed-up over batch size, from the figures of the engine benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

BATCHES = (1, 8, 16)


def draw_speedup(path: Path, figures: Mapping[str, float]) -> None:
    """Draw speed over batch size: plain decoding and the best fixed plan, over `generate`."""
    best = [figures[f"spec_over_hf_b{batch}"] for batch in BATCHES]
    plain = [figures[f"spec_over_hf_b{batch}"] / figures[f"spec_over_plain_b{batch}"] for batch in BATCHES]
    places = range(len(BATCHES))
    chart = Figure(figsize=(6, 2.6), layout="constrained")
    axes = chart.subplots()
    for shift, heights, label in (
        (-0.2, plain, "plain decoding"),
        (0.2, best, "speculation (best fixed plan), same tokens"),
    ):
        bars = axes.bar([place + shift for place in places], heights, width=0.38, label=label)
        axes.bar_label(bars, fmt="%.1fx", fontsize=8)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--", label="Hugging Face generate")
    axes.set_xticks(list(places), [f"batch {batch}" for batch in BATCHES])
    axes.set_ylabel("rollout speed-up")
    axes.legend(fontsize=8, loc="upper left")
    axes.set_ylim(0, max(best) * 1.25)
    axes.spines[["top", "right"]].set_visible(False)
    # a fixed salt and no date: equal figures give an equal file; text stays text, so that a test can read it
    with matplotlib.rc_context({"svg.hashsalt": "rlhfspec", "svg.fonttype": "none"}):
        chart.savefig(path, metadata={"Date": None, "Creator": None})
