"""Faults at random moments of a run: an actor of any pool is killed, or frozen for a short or a long time."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.faulty.processes import is_zombie, serving_actors

KINDS = (("kill", None), ("kill", None), ("freeze", 4.0), ("freeze", 25.0))
"What, and for how many seconds; the longer one is beyond an instance's heartbeat limit, and within all others."
POOLS = ("generation", "generation", "generation", "reward", "reward", "scheduler", "trainer")
"Drawn from with equal chances: a pool of two instances has more that can fail."
MEAN_GAP_S = 5.0
RECOVERY_LIMIT_S = 300.0
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One that was injected."""

    kind: str
    pool: str
    recovery_s: float | None
    "until the pool had as many actors at work as before, or a frozen one went on; None: the run ended first"


def inject(
    driver: int, *, most: int, seed: int, is_running: Callable[[], bool], say: Callable[[str], None]
) -> list[Fault]:
    """Inject one fault after the other until there were `most` or the run has ended; what they were.

    The next one comes at a random moment after the run has recovered from the last.
    """
    draw = random.Random(seed)
    faults: list[Fault] = []
    while len(faults) < most and is_running():
        _sleep(draw.expovariate(1.0 / MEAN_GAP_S), is_running)
        pool, (kind, freeze_s) = draw.choice(POOLS), draw.choice(KINDS)
        actors = serving_actors(driver)
        if not all(actors.values()):
            # it has not begun, or is at a restart
            continue
        victim = draw.choice(sorted(actors[pool]))
        began_s = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL if freeze_s is None else signal.SIGSTOP)
            recovery_s = _recovery_s(driver, pool, actors, victim, began_s, freeze_s, is_running)
            faults.append(
                Fault(
                    kind=kind if freeze_s is None else f"freeze {freeze_s:g} s",
                    pool=pool,
                    recovery_s=recovery_s,
                )
            )
            took = "the run ended" if recovery_s is None else f"recovered after {recovery_s:.1f} s"
            say(f"fault {len(faults)}: {faults[-1].kind} of {pool}: {took}")
    return faults


def _recovery_s(
    driver: int,
    pool: str,
    before: dict[str, set[int]],
    victim: int,
    began_s: float,
    freeze_s: float | None,
    is_running: Callable[[], bool],
) -> float | None:
    thawed = freeze_s is None
    while is_running() and time.monotonic() - began_s < RECOVERY_LIMIT_S:
        if not thawed and freeze_s is not None and time.monotonic() - began_s > freeze_s:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)
            thawed = True
        now = serving_actors(driver)
        others = {name: len(pids - {victim}) for name, pids in now.items()}
        if all(others[name] >= len(pids) for name, pids in before.items()):
            break
        if thawed and freeze_s is not None and not is_zombie(victim):
            # it goes on by itself
            break
        time.sleep(_LOOK_S)
    if not thawed:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
    return time.monotonic() - began_s if is_running() else None


def _sleep(seconds: float, is_running: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + seconds
    while is_running() and time.monotonic() < ends_s:
        time.sleep(min(_LOOK_S, max(ends_s - time.monotonic(), 0.0)))
