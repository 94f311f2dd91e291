"""The tables of `rlhfspec show`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ..folder.iteration_logs import Histogram
from .run_record import RunRecord
from .summary import STEP_PARTS, Summary

SHOWN = (
    "reward/mean",
    "reward/accuracy",
    "eval/reward_mean",
    "eval/accuracy",
    "eval/pass_at_k",
    "eval/loss",
    "eval/margin",
    "train/loss",
    "train/accuracy",
    "train/grad_norm",
    "train/tokens_per_s",
    "rollout/response_tokens_mean",
    "rollout/length_cut_share",
    "rollout/mean_acceptance_length",
    "rollout/goodput_tokens_per_s",
    "learner/entropy",
    "learner/approx_kl",
    "learner/reference_kl",
    "learner/distill_loss",
    "learner/clip_fraction",
    "learner/grad_norm",
    "time/iteration_s",
    "time/amdahl_bound",
)
"What is drawn where no metric is named."

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 40


def curve(values: Sequence[float], width: int = _CURVE_WIDTH) -> str:
    """Values as a line of bars, neighbours averaged where there are more than `width`."""
    count = min(len(values), width)
    means = []
    for place in range(count):
        part = values[place * len(values) // count : (place + 1) * len(values) // count]
        means.append(sum(part) / len(part))
    low, high = min(means, default=0.0), max(means, default=0.0)
    if not math.isfinite(high - low) or high == low:
        return _BARS[3] * count
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in means)


def shown_names(runs: Sequence[RunRecord], patterns: Sequence[str]) -> list[str]:
    """Metrics to be shown: those that fit the patterns, or the usual ones."""
    known = {name for run in runs for name in run.names(patterns or ("*",))}
    return sorted(known) if patterns else [name for name in SHOWN if name in known]


def curves_table(run: RunRecord, names: Sequence[str]) -> Table:
    """A row a metric: first, curve, last, least and highest value."""
    table = Table(title="curves over the iterations", title_justify="left")
    for column in ("metric", "first", "curve", "last", "min", "max"):
        justify = "left" if column in ("metric", "curve") else "right"
        table.add_column(column, justify=justify, overflow="fold" if column == "metric" else "ellipsis")
    for name in names:
        _, values = run.series(name)
        if values:
            ends = [_number(value) for value in (values[-1], min(values), max(values))]
            table.add_row(name, _number(values[0]), curve(values), *ends)
    return table


def comparison_table(runs: Sequence[RunRecord], names: Sequence[str]) -> Table:
    """A row a metric, a column a run: mean of the last fifth, and its ratio to the first run's."""
    table = Table(title="last-fifth means, and their ratio to the first run's", title_justify="left")
    table.add_column("metric")
    for run in runs:
        table.add_column(run.name, justify="right", overflow="fold")
    for name in names:
        means = [run.last_fifth(name) for run in runs]
        table.add_row(name, *(_beside(mean, means[0], is_first=not at) for at, mean in enumerate(means)))
    summaries = [run.summary for run in runs]
    table.add_section()
    table.add_row("iterations", *(str(len(run.metrics)) for run in runs))
    for part in (*STEP_PARTS, "other"):
        if any(one is not None and one.part_s[part] for one in summaries):
            table.add_row(f"share of the time: {part}", *(_share(one, part) for one in summaries))
    table.add_row("amdahl_bound", *(f"{one.amdahl_bound:.2f} x" if one else "-" for one in summaries))
    return table


def histogram_table(iteration: int, histograms: dict[str, Histogram]) -> Table:
    """A row a histogram, its bins as bars."""
    table = Table(title=f"histograms of iteration {iteration + 1}", title_justify="left")
    for column in ("of", "from", "counts", "to", "samples"):
        table.add_column(column, justify="left" if column in ("of", "counts") else "right")
    for name, made in histograms.items():
        most = max(made.counts)
        bars = "".join(
            _BARS[max(0, math.ceil(count / most * len(_BARS)) - 1)] if count else " " for count in made.counts
        )
        end = made.first + made.width * len(made.counts)
        table.add_row(name, _number(made.first), bars, _number(end), str(sum(made.counts)))
    return table


def run_tree(run: RunRecord, names: Sequence[str]) -> dict[str, Any]:
    """One run for JSON."""
    status, summary = run.run_dir.status(), run.summary
    metrics = {}
    for name in names:
        iterations, values = run.series(name)
        if values:
            metrics[name] = {
                "iterations": iterations,
                "values": values,
                "last_fifth_mean": run.last_fifth(name),
            }
    return {
        "run": str(run.run_dir.path),
        "state": status["state"],
        "reason": status["reason"],
        "num_iterations": len(run.metrics),
        "reward_gain": summary.reward_gain if summary else None,
        "seconds": dict(summary.part_s) | {"total": summary.total_s} if summary else {},
        "amdahl_bound": summary.amdahl_bound if summary else None,
        "metrics": metrics,
    }


def _share(summary: Summary | None, part: str) -> str:
    return "-" if summary is None else f"{summary.part_s[part] / max(summary.total_s, 1e-9):.0%}"


def _beside(mean: float | None, first: float | None, *, is_first: bool) -> str:
    if mean is None:
        return "-"
    if is_first or not first:
        return _number(mean)
    return f"{_number(mean)} ({mean / first:.2f} x)"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.4g}"
