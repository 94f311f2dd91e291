"""What `rlhfspec sft` or `train-reward` achieved, derived from its metrics alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SILENT_ADVICE = (
    "see whether the rows differ in what is to be learned, and whether their margins or the steps so far leave "
    "anything"
)


def is_silent(figures: Mapping[str, float]) -> bool:
    """Whether a step had no gradient, and so learned nothing."""
    return figures.get("train/grad_norm") == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedSummary:
    """Steps, losses on rows held out and learned from, speed."""

    num_steps: int
    held_out: Mapping[str, tuple[float, float]]
    "figure: at the first and at the last evaluation"
    train_loss: tuple[float, float]
    "means of the first and of the last fifth of the steps"
    tokens_per_s: float
    "mean over the steps"
    total_s: float
    num_silent: int = 0
    "steps with a gradient of 0"

    def rows(self) -> list[tuple[str, str]]:
        """The closing table: label and value."""
        rows = [("steps", f"{self.num_steps:,}")]
        for name, (first, last) in self.held_out.items():
            rows.append((f"held-out {name}, first to last", f"{first:.4f} to {last:.4f}"))
        rows.append(
            ("training loss, first to last fifth", f"{self.train_loss[0]:.4f} to {self.train_loss[1]:.4f}")
        )
        if self.num_silent:
            rows.append(("steps that learned nothing", f"{self.num_silent:,}, with a gradient of 0"))
        rows.append(("speed", f"{self.tokens_per_s:,.0f} tokens/s"))
        rows.append(("time of the steps", f"{self.total_s:.1f} s"))
        return rows


def summarise_supervised(metrics: Sequence[Mapping[str, float]]) -> SupervisedSummary | None:
    """Sum up the lines of `metrics.jsonl`; None where no supervised step stands in them."""
    steps = [row for row in metrics if "train/loss" in row]
    if not steps:
        return None
    evaluations = [row for row in metrics if "eval/loss" in row]
    names = [
        name for name in ("loss", "accuracy", "margin") if evaluations and f"eval/{name}" in evaluations[0]
    ]
    fifth = max(1, len(steps) // 5)
    return SupervisedSummary(
        num_steps=int(steps[-1]["iteration"]),
        held_out={name: (evaluations[0][f"eval/{name}"], evaluations[-1][f"eval/{name}"]) for name in names},
        train_loss=(_mean(steps[:fifth], "train/loss"), _mean(steps[-fifth:], "train/loss")),
        tokens_per_s=_mean(steps, "train/tokens_per_s"),
        total_s=sum(row.get("time/step_s", 0.0) for row in steps),
        num_silent=sum(is_silent(row) for row in steps),
    )


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows) / len(rows)
