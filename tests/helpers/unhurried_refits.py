"""Refits whose budget of seconds no busy machine uses up: what they do is then the same everywhere."""

from __future__ import annotations

from rlhfspec.cluster.system.system import System

_SECONDS = 600.0


def give_refits_time(system: System) -> None:
    """Let every refit of the system's draft model take what it needs."""
    refit = system.trainers.refit
    system.trainers.refit = lambda rollouts, budget_s: refit(rollouts, max(budget_s, _SECONDS))
