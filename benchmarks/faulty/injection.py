"""Injects faults into a running command from outside, one after the other, and says how each was borne.

A kill is SIGKILL; a freeze SIGSTOP, for a short time that the run must sit out, or a long one beyond the limit of
silence, after which the run must have found it and put another in the place; a cut is of the network between two
processes; the store is filled by a stranger.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeVar

from benchmarks.faulty import network
from benchmarks.faulty.deck import DRIVER, STORE, Card
from benchmarks.faulty.processes import is_zombie, serving_actors
from benchmarks.faulty.store import fill_store
from rlhfspec.core.errors import RlhfSpecError

HEARTBEAT_LIMIT_S = 10.0
ORDER_LIMIT_S = 40.0
"The run's limits of silence: of instances, and of all others."
SECONDS = {"freeze": 4.0, "cut": 4.0, "long_cut": 25.0, "reset": 4.0, "fill": 10.0}
"How long each lasts; of a reset, which is over at once, how long the run has to notice."
_BEYOND_S = 15.0
"How much longer than the limit a long freeze lasts."
RECOVERY_LIMIT_S = 300.0
PAIR_LIMIT_S = 20.0
"For two processes to be connected that are to be cut."
_GRACE_S = 15.0
"For a frozen process that goes on, and has been given up, to end."
_LOOK_S = 0.2
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One that was injected."""

    kind: str
    pool: str
    outcome: str
    "recovered; ended: the run was over first; not_recovered; not_found: frozen for long, and nobody noticed"
    recovery_s: float
    "until every pool had as many actors at work as before and the fault was over, or a frozen one went on"


def inject(
    driver: int,
    cards: Iterator[Card],
    *,
    most: int,
    is_running: Callable[[], bool],
    say: Callable[[str], None],
    log: Path,
    limit_s: float,
) -> list[Fault]:
    """Inject one fault after the other until there were `most` or the run has ended; what they were.

    The next one comes after the card's pause, when the run has recovered from the last and all pools serve.
    `log` gets what helpers say. Raises RlhfSpecError when there were not `most` within `limit_s`.
    """
    faults: list[Fault] = []
    ends_s = time.monotonic() + limit_s
    while len(faults) < most and is_running():
        card = next(cards)
        _sleep(card.gap_s, is_running)
        while is_running() and not all(serving_actors(driver).values()):
            # it has not begun, or is at a restart
            if time.monotonic() > ends_s:
                raise RlhfSpecError(
                    f"after {limit_s:.0f} s and {len(faults)} of {most} faults not all pools have an actor: "
                    f"{serving_actors(driver)}"
                )
            time.sleep(_LOOK_S)
        if not is_running():
            break
        fault = _Injection(driver, card, is_running, log).run()
        if fault is None:
            say(f"passed over: {card.kind} of {card.pool}: it was gone, or the two were not connected")
            continue
        faults.append(fault)
        say(
            f"fault {len(faults)}: {fault.kind} of {fault.pool}: {fault.outcome} after {fault.recovery_s:.1f} s"
        )
    return faults


class _Injection:
    """One fault, from its beginning to the recovery."""

    def __init__(self, driver: int, card: Card, is_running: Callable[[], bool], log: Path) -> None:
        self._driver, self._card, self._is_running, self._log = driver, card, is_running, log
        self._before = serving_actors(driver)
        self._began_s = time.monotonic()

    def run(self) -> Fault | None:
        """Inject it and wait; None when it could not be."""
        card = self._card
        if card.kind in ("kill", "freeze", "long_freeze"):
            if not self._before[card.pool]:
                return None
            victim = _one_of(sorted(self._before[card.pool]), card.choice)
            try:
                os.kill(victim, signal.SIGKILL if card.kind == "kill" else signal.SIGSTOP)
            except ProcessLookupError:
                return None
            return self._fault(self._borne(victim))
        if card.pool == STORE:
            return self._filled()
        pair = self._connected_pair()
        if pair is None:
            return None
        self._began_s = time.monotonic()
        if card.kind == "reset":
            network.reset(*pair)
            _sleep(SECONDS["reset"], self._is_running)
        else:
            network.cut(*pair, SECONDS[card.kind], self._is_running)
        return self._fault(self._at_strength(lost=set()))

    def _fault(self, outcome: str) -> Fault:
        seconds = time.monotonic() - self._began_s
        return Fault(kind=self._card.kind, pool=self._card.pool, outcome=outcome, recovery_s=seconds)

    def _filled(self) -> Fault:
        try:
            self._began_s = fill_store(self._driver, SECONDS["fill"], self._log)
        except RlhfSpecError:
            if self._is_running():
                raise
        return self._fault(self._at_strength(lost=set()))

    def _borne(self, victim: int) -> str:
        """How a kill or a freeze was borne; whoever was frozen is let go on."""
        kind = self._card.kind
        if kind == "kill":
            return self._at_strength(lost={victim})
        try:
            while self._is_running() and time.monotonic() - self._began_s < freeze_s(kind, self._card.pool):
                time.sleep(_LOOK_S)
        finally:
            found = is_zombie(victim) or self._has_replaced({victim})
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)
        if kind == "freeze" and not found:
            # it goes on by itself
            return "recovered" if self._is_running() else "ended"
        ends_s = time.monotonic() + _GRACE_S
        while self._is_running() and not (found or is_zombie(victim)):
            if time.monotonic() > ends_s:
                return "not_found"
            time.sleep(_LOOK_S)
        return self._at_strength(lost={victim})

    def _at_strength(self, *, lost: set[int]) -> str:
        """Wait until every pool has as many actors at work as before, beside those that are lost."""
        while self._is_running():
            if self._has_replaced(lost):
                return "recovered"
            if time.monotonic() - self._began_s > RECOVERY_LIMIT_S:
                return "not_recovered"
            time.sleep(_LOOK_S)
        return "ended"

    def _has_replaced(self, lost: set[int]) -> bool:
        now = serving_actors(self._driver)
        return all(len(now[pool] - lost) >= len(pids) for pool, pids in self._before.items())

    def _connected_pair(self) -> tuple[int, int] | None:
        """Two processes of the card's two pools that have a connection; waited for."""
        ends_s = time.monotonic() + PAIR_LIMIT_S
        while self._is_running() and time.monotonic() < ends_s:
            one, _, other = self._card.pool.partition("-")
            pairs = [
                pair
                for pair in product(self._members(one), self._members(other))
                if network.are_connected(*pair)
            ]
            if pairs:
                self._before = serving_actors(self._driver)
                return _one_of(pairs, self._card.choice)
            time.sleep(_LOOK_S)
        return None

    def _members(self, pool: str) -> list[int]:
        return [self._driver] if pool == DRIVER else sorted(serving_actors(self._driver)[pool])


def freeze_s(kind: str, pool: str) -> float:
    """How long a freeze lasts: a long one is beyond the limit of silence of its pool."""
    if kind == "freeze":
        return SECONDS[kind]
    return (HEARTBEAT_LIMIT_S if pool == "generation" else ORDER_LIMIT_S) + _BEYOND_S


def _one_of(candidates: Sequence[T], choice: float) -> T:
    return candidates[int(choice * len(candidates))]


def _sleep(seconds: float, is_running: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + seconds
    while is_running() and time.monotonic() < ends_s:
        time.sleep(min(_LOOK_S, max(ends_s - time.monotonic(), 0.0)))
