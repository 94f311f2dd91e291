"""A pair's profile on this machine, and how much longer everything takes while another core is as busy.

Profiles are `rlhfspec profile`, in processes of their own: one alone, then two at the same time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.simulated_runs.core_watch import CoreWatch
from benchmarks.support.command import TIMEOUT_S, run_command, setting_words, start_command
from benchmarks.support.result import ROOT
from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.policies.reallocation.rate_curve import rate_curve_from_profile
from rlhfspec.profiles.cost import CostModel
from rlhfspec.profiles.profile import Profile, load_profile

CONTEXT_TOKENS = 64
BATCHES = (1, 2, 4, 8)
MOST_KNOWN = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """Of one pair."""

    alone: Profile
    "as with nothing else busy"
    slowdown: float
    "seconds with both cores busy over seconds with one; at least 1"


def measure_machine(
    config: Path, settings: Sequence[str], out: Path, name: str, *, budget_s: float
) -> MachineProfile:
    """Measure the three profiles. Raises RlhfSpecError with the end of what a command said when it fails."""
    words = ["profile", "--config", str(config), *setting_words(settings), "--budget", str(budget_s), "--out"]
    folders = {part: out / f"{name}-{part}" for part in ("alone", "left", "right")}
    with CoreWatch(is_command) as one:
        run_command([*words, str(folders["alone"])], folder=ROOT, log=out / f"{name}-alone.log")
    _run_both(words, folders, out, name)
    alone, left, right = (load_profile(folder) for folder in folders.values())
    others = one.background.generating
    slower = slowdown(seconds_ratio(alone, (left, right)), background=others)
    return MachineProfile(alone=idle(alone, 1.0 + (slower - 1.0) * min(others, 1.0)), slowdown=slower)


def is_command(line: str) -> bool:
    """Whether a process is one of ours."""
    return "rlhfspec.cluster.cli" in line


def _run_both(words: Sequence[str], folders: Mapping[str, Path], out: Path, name: str) -> None:
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


def seconds_ratio(alone: Profile, together: Sequence[Profile]) -> float:
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
    return statistics.median(ratios)


def slowdown(ratio: float, *, background: float) -> float:
    """What two at once over one alone says of both cores busy over one, where the other was not quite idle.

    With s the slowdown, one alone took 1 + (s - 1) x for x cores of others, and two took s. Cores that are shared out
    do not count: fits leave the few steps aside that wait for a core.
    """
    others = min(background, 1.0)
    if ratio <= 1.0 or ratio * others >= MOST_KNOWN:
        # so busy anyway that nothing is learned
        return max(ratio, 1.0)
    return ratio * (1.0 - others) / (1.0 - ratio * others)


def idle(profile: Profile, factor: float) -> Profile:
    """The profile of the same pair where everything takes so many times less."""
    cost = profile.cost
    phases = (tuple(value / factor for value in phase) for phase in (cost.draft, cost.verify, cost.rest))
    draft, verify, rest = phases
    return replace(profile, cost=CostModel(draft=draft, verify=verify, rest=rest))
