"""One scripted move between two tiny engines with something going wrong on the way, and a second one afterwards."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import tiny_pool
from in_process import NO_FAULTS, FaultPlan
from local_pool import Later, LocalPool

from rlhfspec.core.config import ReallocationConfig
from rlhfspec.engine.engine import Engine
from rlhfspec.policies.migration.move_messages import Settle
from rlhfspec.policies.reallocation.pool_records import Move, MoveMode, PoolView
from rlhfspec.policies.scheduling.events import MoveRecord

SOURCE, DESTINATION = "gen-0", "gen-1"
TIMEOUT_TURNS = 5
LONG_TURNS = 14
"Longer than any two timeouts that follow one another."
RECOVERY_TURNS = 20
"A move that meets a fault is over, in success or failure, so many turns after its order at the latest."


class FewMoves:
    """Orders a move of the first sample of gen-0, and when that is over (or long due) of the next one."""

    def __init__(self, mode: MoveMode, count: int) -> None:
        self.mode = mode
        self.count = count
        self.pool: LocalPool | None = None
        self.num_ordered = 0

    def plan(self, view: PoolView) -> tuple[Move, ...]:
        assert self.pool is not None
        keys = {i.instance: i.keys for i in view.instances}
        ended = self.pool.outcome.moves
        due_s = (
            0.04
            if not self.num_ordered
            else ended[-1].ended_s + 0.03
            if ended
            else 0.04 + RECOVERY_TURNS / 100
        )
        if (
            self.num_ordered == self.count
            or view.now_s < due_s
            or not keys.get(SOURCE)
            or DESTINATION not in keys
        ):
            return ()
        key = keys[SOURCE][0]
        mode = self.mode if not self.num_ordered else MoveMode.MIGRATE
        self.num_ordered += 1
        move = Move(key=key, source=SOURCE, destination=DESTINATION, mode=mode, gain_s=0.0, reason="scripted")
        return (move,)

    def note_finished(self, num_response_tokens: int) -> None:
        pass

    def note_transfer(self, *, num_bytes: int, seconds: float, cold: bool) -> None:
        pass

    def note_prefill(self, *, num_tokens: int, seconds: float) -> None:
        pass


def name_of(receiver: str, message: Any) -> str:
    """A message's type; of a verdict, who is told what."""
    if isinstance(message, Settle):
        return f"{message.verdict} to {receiver}"
    return type(message).__name__


@dataclass
class OneMove:
    """A pool with four long samples, two on each instance, and a script."""

    mode: MoveMode = MoveMode.MIGRATE
    frame_faults: FaultPlan = NO_FAULTS
    pool: LocalPool = field(init=False)
    policy: FewMoves = field(init=False)
    count: int = 2
    frame_timeout_s: float = 0.3
    bystander: bool = False
    "a third instance, and a fifth sample"
    met: list[str] = field(default_factory=list)
    "faults that took place"
    plants: dict[str, Any] = field(default_factory=dict)
    "message name -> what to do with the first of that name: (pool, receiver, message) -> what arrives"

    def __post_init__(self) -> None:
        self.policy = FewMoves(self.mode, self.count)
        self.pool = LocalPool(
            {
                f"gen-{number}": _idle.pop() if _idle else tiny_pool.engine("seldom")
                for number in range(2 + self.bystander)
            },
            reallocation=self.policy,
            settings=ReallocationConfig(
                timeout_s=TIMEOUT_TURNS * 0.01, frame_bytes=1 << 10, transfer_share=1.0
            ),
            frame_timeout_s=self.frame_timeout_s,
            frame_faults=self.frame_faults,
            fault=self._fault,
        )
        self.policy.pool = self.pool

    def _fault(self, receiver: str, message: Any) -> list[Any]:
        name = name_of(receiver, message)
        plant = self.plants.get(name)
        if plant is None or name in self.met or message.move_id != "0-0":
            return [message]
        self.met.append(name)
        return plant(self.pool, receiver, message)

    def run(self) -> list[MoveRecord]:
        """Run to the end, check every law that holds whatever happens, return the records of the moves."""
        pool = self.pool
        asked = _requests(4 + self.bystander)
        pool.run(list(asked), max_turns=400)
        outcome = pool.outcome
        assert tiny_pool.mismatches(outcome.completions, _reference(len(asked))) == []
        assert outcome.alarms == [] and outcome.delivered_twice == []
        pool.settle(max_turns=RECOVERY_TURNS + LONG_TURNS)
        assert self.met == list(self.plants), "the planted fault never took place"
        # `settle` has seen that nothing is left in them
        _idle.extend(i.engine for i in pool.alive if i.engine.drafter_version == 0)
        return outcome.moves


_idle: list[Engine] = []
"Engines that earlier runs are done with: building one takes as long as a dozen decode steps."


@functools.cache
def _requests(count: int):
    return tiny_pool.requests(count, new_tokens=50)


@functools.cache
def _reference(count: int):
    return tiny_pool.reference(_requests(count))


def drop(pool, receiver, message):
    return []


def duplicate(pool, receiver, message):
    return [message, message]


def delay(pool, receiver, message):
    return [Later(message, LONG_TURNS)]


def echo(pool, receiver, message):
    return [message, Later(message, LONG_TURNS)]
