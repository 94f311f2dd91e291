"""Which faults come, in which order and after which pauses: a function of the seed alone.

A deck of cards is shuffled and dealt, so every run of 40 faults has all of them, each in its number.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Set
from dataclasses import dataclass

MEAN_GAP_S = 2.0
"From one recovery to the next fault: short, so that faults come faster than the run ends."
DRIVER = "driver"
STORE = "object_store"
POOLS = ("generation", "reward", "scheduler", "trainer")
CARDS: tuple[tuple[str, str, int], ...] = (
    ("kill", "generation", 4),
    ("kill", "reward", 2),
    ("kill", "scheduler", 3),
    ("kill", "trainer", 3),
    ("freeze", "generation", 2),
    ("freeze", "reward", 2),
    ("freeze", "scheduler", 2),
    ("freeze", "trainer", 2),
    ("long_freeze", "generation", 2),
    ("long_freeze", "reward", 1),
    ("long_freeze", "scheduler", 1),
    ("long_freeze", "trainer", 1),
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
