"""What a run achieved, derived from its metrics alone, so that a finished folder tells the same story."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlhfspec.cluster.reporting.learning_signal import signal_rows

STEP_PARTS = ("generate", "score", "update", "publish", "refit", "evaluate")
"Parts of an iteration that the loop times as `time/<part>_s`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Totals and means over a run; `first` and `last` are means over a fifth of the iterations."""

    num_iterations: int
    num_samples: int
    num_response_tokens: int
    reward_first: float
    reward_last: float
    accuracy_first: float | None
    accuracy_last: float | None
    mean_acceptance_length: float
    acceptance_rate: float
    acceptance_first: float
    acceptance_last: float
    goodput_tokens_per_s: float
    "response tokens over the seconds of generation"
    num_moved: int
    "samples moved between instances while they ran"
    is_invariant: bool | None
    "bits were promised in every iteration; None: the metrics do not say"
    total_s: float
    part_s: Mapping[str, float]
    "seconds by part of the iteration; `other` is what no part claims"
    update_hidden_s: float = 0.0
    "of updates, behind the sampling of later batches"
    signal: Sequence[tuple[str, str]] = ()
    "rows about iterations that could teach nothing (`cluster.reporting.learning_signal`)"

    @property
    def amdahl_bound(self) -> float:
        """How many times faster the iterations were if generation took no time."""
        return amdahl_bound(self.total_s, self.part_s["generate"] - self.update_hidden_s)

    @property
    def reward_gain(self) -> float:
        """Mean reward of the last fifth less that of the first."""
        return self.reward_last - self.reward_first

    def rows(self) -> list[tuple[str, str]]:
        """The closing table: label and value."""
        rows = [
            ("iterations", str(self.num_iterations)),
            ("samples", f"{self.num_samples:,}"),
            ("response tokens", f"{self.num_response_tokens:,}"),
            (
                "mean reward, first to last fifth",
                f"{self.reward_first:.3f} to {self.reward_last:.3f} ({self.reward_gain:+.3f})",
            ),
        ]
        if self.accuracy_first is not None and self.accuracy_last is not None:
            rows.append(
                ("accuracy, first to last fifth", f"{self.accuracy_first:.3f} to {self.accuracy_last:.3f}")
            )
        rows += self.signal
        if self.num_moved:
            rows.append(("samples moved", f"{self.num_moved:,}"))
        if self.is_invariant is not None:
            promise = (
                "every bit"
                if self.is_invariant
                else "the distribution, not every bit (see the run's first lines)"
            )
            rows.append(("tokens reproduce", promise))
        rows += [
            ("mean acceptance length", f"{self.mean_acceptance_length:.2f} tokens a decode step"),
            ("acceptance rate", f"{self.acceptance_rate:.3f} of the draft tokens"),
            ("  first to last fifth", f"{self.acceptance_first:.3f} to {self.acceptance_last:.3f}"),
            ("goodput", f"{self.goodput_tokens_per_s:,.0f} tokens/s"),
            ("time", f"{self.total_s:.1f} s"),
        ]
        rows += [
            (f"  {name}", f"{seconds:.1f} s ({seconds / max(self.total_s, 1e-9):.0%})")
            for name, seconds in self.part_s.items()
            if seconds or name != "evaluate"
        ]
        twice = amdahl_bound(self.total_s, self.part_s["generate"] - self.update_hidden_s, times=2.0)
        rows.append(
            (
                "faster generation (Amdahl)",
                f"{twice:.2f} x if 2 x as fast, {self.amdahl_bound:.2f} x if free",
            )
        )
        return rows

    def text(self) -> str:
        """The table as plain text, one row a line."""
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows) + "\n"


def amdahl_bound(total_s: float, generate_s: float, *, times: float = math.inf) -> float:
    """How many times faster the whole were if generation were `times` as fast, by default infinitely.

    Source: Amdahl 1967, 'Validity of the single processor approach to achieving large scale computing capabilities'.
    """
    generate_s = min(max(generate_s, 0.0), total_s)
    left_s = total_s - generate_s + generate_s / times
    return total_s / max(left_s, 1e-9 * total_s, 1e-9)


def summarise(metrics: Sequence[Mapping[str, float]]) -> Summary | None:
    """Sum up the lines of `metrics.jsonl`; None when no iteration finished, or for supervised training's."""
    if not metrics or any("train/loss" in row for row in metrics):
        return None
    fifth = max(1, len(metrics) // 5)
    samples = [row.get("rollout/num_samples", 0.0) for row in metrics]
    tokens = [
        n * row.get("rollout/response_tokens_mean", 0.0) for n, row in zip(samples, metrics, strict=True)
    ]
    # the last update of a run ahead has nothing beside it
    decoded = [row for row in metrics if "rollout/acceptance_rate" in row]
    promised = [row["rollout/invariant"] == 1.0 for row in metrics if "rollout/invariant" in row]
    part_s = {part: _total(metrics, f"time/{part}_s") for part in STEP_PARTS}
    total_s = _total(metrics, "time/iteration_s")
    part_s["other"] = max(0.0, total_s - sum(part_s.values()))
    return Summary(
        num_iterations=len(metrics),
        num_samples=round(sum(samples)),
        num_response_tokens=round(sum(tokens)),
        reward_first=_mean(metrics[:fifth], "reward/mean") or 0.0,
        reward_last=_mean(metrics[-fifth:], "reward/mean") or 0.0,
        accuracy_first=_mean(metrics[:fifth], "reward/accuracy"),
        accuracy_last=_mean(metrics[-fifth:], "reward/accuracy"),
        mean_acceptance_length=_mean(metrics, "rollout/mean_acceptance_length") or 1.0,
        acceptance_rate=_mean(metrics, "rollout/acceptance_rate") or 0.0,
        acceptance_first=_mean(decoded[:fifth], "rollout/acceptance_rate") or 0.0,
        acceptance_last=_mean(decoded[-fifth:], "rollout/acceptance_rate") or 0.0,
        goodput_tokens_per_s=sum(tokens) / max(part_s["generate"], 1e-9),
        num_moved=round(_total(metrics, "moves/num_moved")),
        is_invariant=all(promised) if promised else None,
        total_s=total_s,
        part_s=part_s,
        update_hidden_s=_total(metrics, "time/update_hidden_s"),
        signal=signal_rows(metrics),
    )


def _total(metrics: Iterable[Mapping[str, float]], name: str) -> float:
    return sum(row.get(name, 0.0) for row in metrics)


def _mean(metrics: Iterable[Mapping[str, float]], name: str) -> float | None:
    values = [row[name] for row in metrics if name in row]
    return sum(values) / len(values) if values else None
