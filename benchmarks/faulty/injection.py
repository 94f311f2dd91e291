"""Injects faults into a running command from outside, one after the other, and says how each was borne.

Which faults come, in which order and after which pauses is a function of the seed alone: a deck of cards is shuffled
and dealt. A kill is SIGKILL; a freeze SIGSTOP, for a short time that the run must sit out, or a long one beyond the
limit of silence, after which the run must have found it and put another in the place; a cut is of the network between
two processes; the store is filled by a stranger.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeVar

from ...core.errors import RlhfSpecError
from ...core.proc_files import PROC, stat_fields
from ..support.processes import command_line, descendants
from ..support.result import ROOT
from . import network

MEAN_GAP_S = 2.0
"From one recovery to the next fault: short, so that faults come faster than the run ends."
DRIVER = "driver"
STORE = "object_store"
CARDS: tuple[tuple[str, str, int], ...] = (
    ("kill", "generation", 4),
    ("kill", "reward", 2),
    ("kill", "scheduler", 3),
    ("kill", "trainer", 3),
    ("kill", "follower", 2),
    ("freeze", "generation", 2),
    ("freeze", "reward", 2),
    ("freeze", "scheduler", 2),
    ("freeze", "trainer", 2),
    ("freeze", "follower", 1),
    ("long_freeze", "generation", 2),
    ("long_freeze", "reward", 1),
    ("long_freeze", "scheduler", 1),
    ("long_freeze", "trainer", 1),
    ("long_freeze", "follower", 1),
    ("cut", "driver-generation", 1),
    ("cut", "driver-reward", 1),
    ("cut", "driver-scheduler", 1),
    ("cut", "driver-trainer", 1),
    ("cut", "scheduler-generation", 1),
    ("cut", "generation-generation", 1),
    ("long_cut", "scheduler-generation", 1),
    ("long_cut", "driver-trainer", 1),
    ("reset", "scheduler-generation", 1),
    ("reset", "generation-generation", 1),
    ("reset", "driver-scheduler", 1),
    ("reset", "driver-reward", 1),
    ("reset", "driver-trainer", 1),
    ("fill", STORE, 2),
)
"Kind, whom it meets, how many of a deck. A pair of two processes is joined by a dash."
NETWORK_KINDS = frozenset({"cut", "long_cut", "reset"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One fault to come."""

    kind: str
    pool: str
    "of the victim, or a pair of two, or the object store"
    gap_s: float
    "after the recovery from the one before"
    choice: float
    "in [0, 1): which of a pool's actors"


def deal(seed: int, *, without: Set[str] = frozenset()) -> Iterator[Card]:
    """Deal cards without end, one shuffled deck after the other; `without` leaves out kinds that cannot be had."""
    draw = random.Random(seed)
    kinds = [(kind, pool) for kind, pool, number in CARDS if kind not in without for _ in range(number)]
    while kinds:
        draw.shuffle(kinds)
        for kind, pool in kinds:
            gap_s = min(draw.expovariate(1.0 / MEAN_GAP_S), 4.0 * MEAN_GAP_S)
            yield Card(kind=kind, pool=pool, gap_s=gap_s, choice=draw.random())


POOLS: Mapping[str, str] = {
    "generation": "GenerationActor",
    "reward": "RewardActor",
    "scheduler": "SchedulerActor",
    "trainer": "TrainerActor",
    "follower": "RankActor",
}
"Pool: the class that Ray writes into the process' title, `ray::CLASS.method` while it works."


def serving_actors(driver: int) -> dict[str, set[int]]:
    """Process ids by pool of all actors below a driver that have been built; followers where there are any."""
    titles = {pid: command_line(pid) for pid in descendants(driver)}
    found = {
        pool: {
            pid
            for pid, title in titles.items()
            if re.match(rf"ray::{name}\b", title) and ".__init__" not in title and not is_zombie(pid)
        }
        for pool, name in POOLS.items()
    }
    return {pool: pids for pool, pids in found.items() if pids or pool != "follower"}


def is_zombie(pid: int) -> bool:
    """Whether a process has ended, asked how or not."""
    return stat_fields(pid)[:1] in ([], ["Z"])


LIMIT_S = 180.0


def fill_store(driver: int, seconds: float, log: Path) -> float:
    """Fill it, and return when it has been let go: since when it was full, by `time.monotonic`; words go to `log`.

    Raises RlhfSpecError when it could not be filled, or is not let go within its limit.
    """
    command = [
        sys.executable,
        "-m",
        "rlhfspec.benchmarks.faulty.fill_store",
        cluster_address(driver),
        str(seconds),
    ]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with (
        log.open("ab") as said,
        subprocess.Popen(
            command, cwd=log.parent, env=environment, stdout=subprocess.PIPE, stderr=said
        ) as filler,
    ):
        try:
            words = filler.communicate(timeout=seconds + LIMIT_S)[0].decode()
        except subprocess.TimeoutExpired:
            words = ""
        finally:
            filler.kill()
        said.write(words.encode())
    full = re.search(r"full at (\S+):", words)
    if full is None or filler.returncode != 0:
        raise RlhfSpecError(
            f"the object store could not be filled within {LIMIT_S:.0f} s: the filler ended with "
            f"{filler.returncode}, expected 0; see {log}"
        )
    return float(full[1])


def cluster_address(driver: int) -> str:
    """`host:port` of the Ray that a driver started, read from its raylet's command line. Raises RlhfSpecError."""
    for pid in descendants(driver):
        with suppress(OSError):
            words = (PROC / str(pid) / "cmdline").read_text(errors="replace").replace("\0", " ")
            if found := re.search(r"raylet .*--gcs-address=(\S+)", words):
                return found[1]
    raise RlhfSpecError(f"process {driver} has no raylet below it; expected a run with a Ray of its own")


INSTANCES = frozenset({"generation", "follower"})
"A follower that is silent is found by its instance's decode step, which does not end."
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
            if not self._before.get(card.pool):
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
        return all(len(now.get(pool, set()) - lost) >= len(pids) for pool, pids in self._before.items())

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
    return (HEARTBEAT_LIMIT_S if pool in INSTANCES else ORDER_LIMIT_S) + _BEYOND_S


def _one_of(candidates: Sequence[T], choice: float) -> T:
    return candidates[int(choice * len(candidates))]


def _sleep(seconds: float, is_running: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + seconds
    while is_running() and time.monotonic() < ends_s:
        time.sleep(min(_LOOK_S, max(ends_s - time.monotonic(), 0.0)))
