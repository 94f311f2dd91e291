"""How busy the cores of this machine are with anything but what is simulated; Linux, from /proc."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from benchmarks.support.process_tree import descendants
from rlhfspec.core.proc_files import PROC, SYSTEM_TICKS, USER_TICKS, stat_fields

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
    """Within `with`, looks five times a second; afterwards `background` is there."""

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
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._kind_of: dict[int, int | None] = {}
        "by process: which of both, if any"
        self._ticks: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._looks: list[Look] = []

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        self._ended.set()
        self._thread.join()

    @property
    def background(self) -> Background:
        """What was seen."""
        return background(self._looks, cores=os.cpu_count() or 1)

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            if self._is_on():
                self._looks.append(self._look())

    def _look(self) -> Look:
        for pid in descendants(os.getpid()):
            fields = stat_fields(pid)
            if self._kind_of.get(pid) is None:
                # a worker of Ray gets its name when it becomes an actor
                line = _command(pid)
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


def _command(pid: int) -> str:
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
