"""This machine as runs have it: a pair's profile, how much longer all takes while another core is busy, and who is.

Profiles are `rlhfspec profile`, in processes of their own: one alone, then two at the same time. How busy the cores are
with anything but what is simulated is read from /proc (Linux).
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...core.awake import looking
from ...core.errors import RlhfSpecError
from ...core.proc_files import PROC, SYSTEM_TICKS, USER_TICKS, stat_fields
from ...policies.reallocation.rate_curve import rate_curve_from_profile
from ...profiles.cost import CostModel
from ...profiles.profile import Profile, load_profile
from ..support.processes import (
    TIMEOUT_S,
    command_line,
    descendants,
    run_command,
    setting_words,
    start_command,
)
from ..support.result import ROOT

INTERVAL_S = 0.2
GENERATES = 0.3
"Of an interval that instances were at work: it counts as generation."
_BUSY = (0, 1, 2, 5, 6)
"Of /proc/stat: user, nice, system, irq, softirq; a guest's are within user."
_IDLE = (3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """Cores that others kept busy, on average."""

    generating: float
    "while instances worked"
    resting: float
    "while none did"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Ticks since some start."""

    busy: int
    "of all cores"
    passed: int
    "of all cores, idle ones included"
    instances: int
    trainer: int


class CoreWatch:
    """To be looked through every `INTERVAL_S` seconds (`processes.looking`); then `background` is there."""

    def __init__(
        self,
        is_instance: Callable[[str], bool],
        is_trainer: Callable[[str], bool] = lambda line: False,
        *,
        is_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """Watch from the first look at which `is_on` to the last.

        Args:
            is_instance: by its command line, whether a process below this one is.
            is_trainer: the same of the trainer.
            is_on: whether what is watched goes on.
        """
        self._kinds, self._is_on = (is_instance, is_trainer), is_on
        self._kind_of: dict[int, int | None] = {}
        "by process: which of both, if any"
        self._ticks: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._looks: list[Look] = []

    @property
    def background(self) -> Background:
        """What was seen."""
        return background(self._looks, cores=os.cpu_count() or 1)

    def look(self) -> None:
        """Take note of who was at work until now."""
        if self._is_on():
            self._looks.append(self._look())

    def _look(self) -> Look:
        for pid in descendants(os.getpid()):
            fields = stat_fields(pid)
            if self._kind_of.get(pid) is None:
                # a worker of Ray gets its name when it becomes an actor
                line = command_line(pid)
                kinds = [number for number, is_one in enumerate(self._kinds) if is_one(line)]
                self._kind_of[pid] = kinds[0] if kinds else None
            kind = self._kind_of[pid]
            if fields and kind is not None:
                self._ticks[kind][pid] = int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])
        busy, idle = all_ticks((PROC / "stat").read_text())
        instances, trainer = (sum(ticks.values()) for ticks in self._ticks)
        return Look(busy=busy, passed=busy + idle, instances=instances, trainer=trainer)


def background(looks: Sequence[Look], *, cores: int) -> Background:
    """What neither instances nor trainer took of the cores between the looks, apart for generation; 0 without any."""
    others, passed = [0, 0], [0, 0]
    for before, after in itertools.pairwise(looks):
        ticks = after.passed - before.passed
        instances, trainer = after.instances - before.instances, after.trainer - before.trainer
        generates = instances * cores > GENERATES * ticks
        others[generates] += after.busy - before.busy - instances - trainer
        passed[generates] += ticks
    resting, generating = (
        cores * max(mine, 0) / max(whole, 1) for mine, whole in zip(others, passed, strict=True)
    )
    return Background(generating=generating, resting=resting)


def all_ticks(text: str) -> tuple[int, int]:
    """Busy and idle ticks of all cores together, from what /proc/stat says."""
    ticks = [int(word) for word in text.split("\n", 1)[0].split()[1:]]
    return sum(ticks[place] for place in _BUSY), sum(ticks[place] for place in _IDLE)


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
    one = CoreWatch(is_command)
    with looking(one.look, INTERVAL_S):
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
