"""Runs that change the target's style on purpose: with a head trained in idle time, and with a frozen one.

The shipped config of SmolLM2-135M-Instruct, which learns to answer in one short sentence. Drafts are of one fixed
shape, so that acceptance tells of the head alone.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.rlhf import Metrics, train
from benchmarks.support.result import ROOT
from benchmarks.support.timing import Figures

CONFIG = ROOT / "configs" / "smollm2_grpo.yaml"
ITERATIONS = {"default": 12, "full": 12}
ROUNDS = {"default": 1, "full": 3}
LAST = 3
"Iterations that acceptance is told of."
SHAPE = (
    "speculation.drafter=head",
    "speculation.policy=fixed",
    "speculation.num_nodes=4",
    "speculation.depth=2",
    "speculation.branching=2",
)
WAYS = {"frozen": ("drafter_training.refit=false",), "adapted": ("drafter_training.spot=on",)}


def adapted_over_frozen(out: Path, mode: str, head: Path, figures: Figures) -> int:
    """Keep the figures of both; returns how many samples' rewards differ, for no token depends on the head."""
    common = [*SHAPE, f"models.draft={head}", f"run.iterations={ITERATIONS[mode]}"]
    acceptance, step_s, generate_s = ([], [], [])
    differing = 0
    for number in range(ROUNDS[mode]):
        runs: dict[str, Metrics] = {}
        for name in WAYS if number % 2 == 0 else reversed(WAYS):
            runs[name] = train(CONFIG, out, name, [*common, *WAYS[name]])
        adapted, frozen = runs["adapted"], runs["frozen"]
        acceptance.append(_ended(adapted) / _ended(frozen))
        # of every iteration but the first, whose actors are still warming up
        pairs = list(zip(adapted[1:], frozen[1:], strict=True))
        step_s += [a["time/iteration_s"] / f["time/iteration_s"] for a, f in pairs]
        generate_s += [a["time/generate_s"] / f["time/generate_s"] for a, f in pairs]
        differing += sum(a["reward/mean"] != f["reward/mean"] for a, f in zip(adapted, frozen, strict=True))
        figures.values["head_published_share"] = statistics.fmean(
            row.get("draft/refit_taken", 0.0) for row in adapted
        )
        figures.values["frozen_acceptance_length"] = _ended(frozen)
        figures.values["reward_shift"] = frozen[-1]["reward/mean"] - frozen[0]["reward/mean"]
    figures.keep("adapted_over_frozen_acceptance", acceptance)
    figures.keep("adapted_step_time_over_frozen", step_s)
    figures.keep("spot_rollout_slowdown", generate_s)
    return differing


def _ended(metrics: Metrics) -> float:
    """Mean acceptance length of the last iterations."""
    return statistics.fmean(row["rollout/mean_acceptance_length"] for row in metrics[-LAST:])
