"""A pair's profile on this machine, and how much longer everything takes while another core is as busy.

Profiles are `rlhfspec profile`, in processes of their own: one alone, then two at the same time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.command import TIMEOUT_S, run_command, setting_words, start_command
from benchmarks.support.result import ROOT
from core.errors import RlhfSpecError
from policies.reallocation.rate_curve import rate_curve_from_profile
from profiles.profile import Profile, load_profile

CONTEXT_TOKENS = 64
BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """Of one pair."""

    alone: Profile
    slowdown: float
    "seconds with both cores busy over seconds with one; at least 1"


def measure_machine(
    config: Path, settings: Sequence[str], out: Path, name: str, *, budget_s: float
) -> MachineProfile:
    """Measure the three profiles. Raises RlhfSpecError with the end of what a command said when it fails."""
    words = ["profile", "--config", str(config), *setting_words(settings), "--budget", str(budget_s), "--out"]
    folders = {part: out / f"{name}-{part}" for part in ("alone", "left", "right")}
    run_command([*words, str(folders["alone"])], folder=ROOT, log=out / f"{name}-alone.log")
    both = {
        part: start_command([*words, str(folders[part])], folder=ROOT, log=out / f"{name}-{part}.log")
        for part in ("left", "right")
    }
    try:
        codes = {part: command.wait(timeout=TIMEOUT_S) for part, command in both.items()}
    finally:
        for command in both.values():
            command.kill()
    if any(codes.values()):
        raise RlhfSpecError(f"two profiles at once of {name} ended with {codes}; see the logs in {out}")
    alone, left, right = (load_profile(folder) for folder in folders.values())
    return MachineProfile(alone=alone, slowdown=slowdown(alone, (left, right)))


def slowdown(alone: Profile, together: Sequence[Profile]) -> float:
    """Median over batches, with drafts and without, of seconds a token beside another process over those alone."""
    ratios = []
    for speculation in (False, True):
        curves = [
            rate_curve_from_profile(profile, context_tokens=CONTEXT_TOKENS, speculation=speculation)
            for profile in (alone, *together)
        ]
        for batch in BATCHES:
            first, *others = (float(curve.seconds_per_token(batch)) for curve in curves)
            ratios.append(statistics.fmean(others) / first)
    return max(statistics.median(ratios), 1.0)
