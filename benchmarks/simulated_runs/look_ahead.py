"""Look-ahead beside turns and staleness on simulated H100s: how many times as short a step is, by tail and agreement.

Qwen2.5-7B, 32 samples an instance, prompts of 128 tokens, log-normal lengths up to a limit; an update as long as leaves
generation 65% of a step in turns. `agreement`: mean tokens before the first difference, as measured on SmolLM2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from ...core.settings.simulated_cluster import SimulatedClusterConfig
from ...policies.simulate.cluster_simulation import Phase, simulate_cluster
from ...policies.simulate.described_cluster import describe

TAILS = {"gsm8k": 512, "chat": 2048, "reasoning": 8192}
"Limits; the median is a sixth."
AGREEMENTS = (2800, 560, 41)
"One step of 1e-6, sixteen, four of 1e-5."
CASES = (("none", 1, 6), ("none", 8, 6), ("head", 8, 6), ("none", 64, 2))
"Drafter, instances, steps."
GENERATION = 0.65


def look_ahead_rows(cases: tuple[tuple[str, int, int], ...] = CASES) -> Iterator[dict[str, Any]]:
    """Simulate the table row by row: seconds in turns, and what each way divides them by."""
    for drafter, instances, steps in cases:
        for tail in TAILS:
            for colocated in (False, True):
                yield _row(drafter, instances, steps, tail, colocated)


def look_ahead_table(rows: list[dict[str, Any]]) -> Table:
    """For people; behind a speed-up the share of the attempted tokens that was proved."""
    table = Table(box=None, pad_edge=False)
    for title in rows[0]:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    return table


def _row(drafter: str, instances: int, steps: int, tail: str, colocated: bool) -> dict[str, Any]:
    def simulated(measured_s: float | None = None, **step: Any) -> tuple[Phase, float]:
        tree = {
            "pools": {"instances": instances, "trainer_gpus": instances, "colocated": colocated},
            "lengths": {"samples": 32 * instances, "prompt_tokens": 128, "max_new_tokens": TAILS[tail]},
            "drafter": {"kind": drafter},
            "learner": {"measured_s": measured_s},
            "step": {"steps": steps, "other_s": 0.0} | step,
        }
        made = simulate_cluster(describe(SimulatedClusterConfig.model_validate(tree)))
        return made.speculative, made.publication_s

    turns, published_s = simulated(0.0)
    rest_s = turns.rollout_s * (1.0 - GENERATION) / GENERATION
    learning_s = max(rest_s - published_s, 0.0)
    step_s = turns.rollout_s + published_s + learning_s
    row: dict[str, Any] = {
        "drafter": drafter,
        "instances": instances,
        "tail": tail,
        "pool": "shared" if colocated else "separate",
        "step s": step_s,
    }
    for agreement in AGREEMENTS:
        ahead, _ = simulated(learning_s, look_ahead="auto", agreement_tokens=agreement)
        share = ahead.steps.proved_tokens / max(ahead.steps.attempted_tokens, 1.0)
        row[f"ahead, {agreement}"] = f"{step_s / ahead.step_s:.2f} ({share:.2f})"
    for staleness in (1, 2):
        stale = None if colocated else simulated(learning_s, staleness=staleness)[0]
        row[f"staleness {staleness}"] = "-" if stale is None else step_s / stale.step_s
    return row
