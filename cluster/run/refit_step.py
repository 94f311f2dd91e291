"""The loop's side of a refit: how many seconds it may take, and the publication of what came of it.

The share of the budget is taken of the seconds that this iteration has used up to here. What packing and
publishing took last time is set aside first, so the whole stays within the share. Where that alone is more
than the share, refits come only every few iterations: what is set aside shrinks while nothing is published.
"""

from __future__ import annotations

import time
from typing import Any

from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.run.head_step import train_head
from rlhfspec.cluster.system.system import System
from rlhfspec.learning.drafts.draft_learner import RefitReport

_FORGET = 0.9
"What is left of the seconds set aside after an iteration without a publication."


def refit_draft(system: System, rollouts: Any, *, iteration_s: float, report: Reporter) -> dict[str, float]:
    """Refit the draft model and publish it where new weights were taken; return the figures.

    A refit that ends in what is not finite is given up: the former draft model stays, and a note says so.

    Args:
        system: its `draft` becomes the new version.
        rollouts: reference to the iteration's rollouts.
        iteration_s: seconds the iteration has taken so far.
        report: gets the note.
    """
    config = system.config
    if config.trains_head:
        return train_head(system, iteration_s=iteration_s, report=report)
    if system.draft is None or not config.refits_draft:
        return {}
    began_s = time.perf_counter()
    budget_s = config.drafter_training.budget_share * iteration_s - system.refit_overhead_s
    refit = system.trainers.refit(rollouts, budget_s)
    if refit.outcome == "not_finite":
        report.note(
            "the refit of the draft model gave what is not finite and was given up; version "
            f"{refit.weight_version} stays, and the next refit learns at half the rate; seen often, "
            "lower drafter_training.learning_rate"
        )
    if refit.outcome == "taken":
        system.draft = system.trainers.take("draft")
        system.generation.publish(system.draft)
        system.refit_overhead_s = time.perf_counter() - began_s - refit.refit_s
    else:
        system.refit_overhead_s *= _FORGET
    return refit_figures(refit)


def refit_figures(report: RefitReport) -> dict[str, float]:
    """The report as metrics; a divergence that was not computed is left out."""
    figures = {
        "draft/weight_version": float(report.weight_version),
        "draft/refit_taken": float(report.outcome == "taken"),
        "draft/refit_steps": float(report.num_steps),
        "draft/refit_tokens": float(report.num_tokens),
        "draft/learn_s": report.refit_s,
    }
    for name, value in (("kl_before", report.kl_before), ("kl_after", report.kl_after)):
        if value is not None:
            figures[f"draft/{name}"] = value
    return figures
