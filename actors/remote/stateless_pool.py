"""Actors that answer questions and keep nothing that matters: who is asked what, and who replaces a dead one.

What was asked of an actor that died is asked again of the one that takes its place, so an answer may depend on the
question alone. One that freezes is killed and replaced, too; one that is slow and lives is not: work would only begin
anew, and be paid for again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray

from ...core.errors import WaitTimeout
from . import run_metrics
from .heartbeat import Heartbeat
from .remote import Handle
from .restart_budget import RestartBudget
from .waiting import ActorDied, get, wait_any
from .watch import LOOK_S, OpenWait

Q = TypeVar("Q")
HEARTBEAT_S = 60.0
"As `cluster.heartbeat_timeout_s`."
Replace = Callable[[int, int], Handle]
"Makes the n-th replacement (from 1) of the i-th actor."


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolKind(Generic[Q]):
    """How the actors of one kind are asked, and what a person reads when they do not answer.

    Beside what they are asked they have a method `alive`, which answers at once.
    """

    stem: str
    "they are called STEM-0, STEM-1, ..., replacements STEM-0-r1 and so on"
    call: Callable[[Handle, Q], Any]
    "asks one actor: the reference of its answer"
    order: Callable[[Q], str]
    "what one question asks, as a verb, for messages"
    timeout_s: float
    "how long an actor may go without an answer"
    heartbeat_timeout_s: float
    "how long one that is asked something may give no sign of life"
    again: Callable[[Sequence[Q]], str]
    "what a replacement does with the questions of the dead one, as a verb"
    culprit: str
    "what may have ended the process"
    late_advice: str
    gives_up: Callable[[Q, ActorDied], Any] | None = None
    """answers a question whose second actor died: those of a dead actor are asked again one by one, so that it is known
    which ends its process; None: all are asked again until no replacement is left"""


@dataclass(frozen=True, slots=True)
class _Open(Generic[Q]):
    question: Q
    actor: int
    name: str
    handle: Handle
    wait: OpenWait
    is_suspect: bool = False
    "an actor that was asked this has died"


class StatelessPool(Generic[Q]):
    """Living actors, the questions that each has not answered, and their replacements."""

    def __init__(
        self,
        actors: Sequence[Handle],
        kind: PoolKind[Q],
        *,
        make: Replace | None = None,
        max_restarts: int = 0,
        note: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make` None replaces none; `max_restarts`: of each actor within an hour; `note` is told of every one.

        `clock`, monotonic in seconds, measures silences and that hour.
        """
        self._actors = list(actors)
        self._kind = kind
        self._make = make
        self._note = note
        most = max_restarts if make is not None else 0
        self._budgets = [RestartBudget(most, clock=clock) for _ in self._actors]
        self._num_restarts = [0] * len(self._actors)
        self._names = [f"{kind.stem}-{actor}" for actor in range(len(self._actors))]
        self._open: dict[Any, _Open[Q]] = {}
        self._suspects: list[list[Q]] = [[] for _ in self._actors]
        "of each actor, that wait until the one before is answered"
        self._given_up: list[tuple[Q, Any]] = []
        self._clock = clock
        self._heartbeat = Heartbeat(
            lambda actor: actor.alive.remote(), timeout_s=kind.heartbeat_timeout_s, clock=clock
        )
        self._looks_at_s = clock()
        self._heard_of: set[str] = set()

    def __len__(self) -> int:
        return len(self._actors)

    @property
    def num_open(self) -> int:
        """Questions without an answer."""
        return len(self._open) + sum(map(len, self._suspects)) + len(self._given_up)

    def loads(self) -> list[int]:
        """Questions that each actor has not answered."""
        loads = [0] * len(self._actors)
        for asked in self._open.values():
            loads[asked.actor] += 1
        return loads

    def check(self, call: Callable[[Handle], Any], *, order: str, timeout_s: float) -> None:
        """Let every actor carry out one call. Raises what that raises."""
        refs = [call(actor) for actor in self._actors]
        for name, ref in zip(self._names, refs, strict=True):
            get(ref, waiter="the loop", waited_for=name, order=order, timeout_s=timeout_s)
            self._heard_of.add(name)

    def send(self, actor: int, call: Callable[[Handle], Any]) -> None:
        """Call one actor whose answer nobody reads."""
        call(self._actors[actor])

    def ask(self, actor: int, question: Q) -> None:
        """Ask one actor; the caller goes on."""
        self._ask(actor, question)

    def _ask(self, actor: int, question: Q, *, is_suspect: bool = False) -> None:
        name, handle = self._names[actor], self._actors[actor]
        wait = OpenWait(
            waiter="the loop",
            waited_for=name,
            order=self._kind.order(question),
            timeout_s=self._kind.timeout_s,
        )
        self._open[self._kind.call(handle, question)] = _Open(question, actor, name, handle, wait, is_suspect)

    def answers(self, *, wait_s: float, errors: tuple[type[Exception], ...] = ()) -> list[tuple[Q, Any]]:
        """What has been answered, waiting up to `wait_s` for the first; an error of `errors` is an answer too.

        Raises whatever else an actor raised; WaitTimeout when one that lives takes too long; ActorDied when one died or
        froze more often than it may be replaced.
        """
        found: list[tuple[Q, Any]] = []
        for ref in wait_any(list(self._open), timeout_s=wait_s):
            asked = self._open.pop(ref)
            try:
                answer = get(
                    ref,
                    waiter="the loop",
                    waited_for=asked.name,
                    order=self._kind.order(asked.question),
                    timeout_s=self._kind.timeout_s,
                )
            except ActorDied as death:
                self._replace(asked, death)
                continue
            except errors as error:
                answer = error
            asked.wait.answered()
            self._heard_of.add(asked.name)
            for other in self._open.values():
                if other.actor == asked.actor:
                    other.wait.restart()
            found.append((asked.question, answer))
        self._replace_silent()
        self._refuse_late()
        self._ask_suspects()
        found, self._given_up = found + self._given_up, []
        return found

    def _replace(self, asked: _Open[Q], death: ActorDied) -> None:
        """Ask a new actor what the dead one was asked; its other questions come back here one by one."""
        actor = asked.actor
        if asked.handle is self._actors[actor]:
            run_metrics.add("lost_actors", pool=self._kind.stem)
            number, budget = self._num_restarts[actor], self._budgets[actor]
            # whoever gives questions up ends by itself: each costs two actors at most
            if self._make is None or not (self._kind.gives_up or budget.spend()):
                raise ActorDied(
                    f"{death}; all {budget.most} replacements of {self._kind.stem}-{actor} within an hour are used up; "
                    f"look whether {self._kind.culprit} ends its process or needs more memory, or raise "
                    "cluster.max_instance_restarts"
                ) from None
            with suppress(Exception):
                # one that cannot be reached, or is frozen, may live: it gives its place back, and answers no more
                ray.kill(asked.handle)
            self._num_restarts[actor] = number + 1
            self._names[actor] = f"{self._kind.stem}-{actor}-r{number + 1}"
            self._actors[actor] = self._make(actor, number + 1)
            run_metrics.add("replaced_actors", pool=self._kind.stem)
            waiting = [other.question for other in self._open.values() if other.handle is asked.handle]
            redo = self._kind.again([asked.question, *waiting])
            self._note(f"{death}; {self._names[actor]} takes its place and {redo}")
        if self._kind.gives_up is None:
            self.ask(actor, asked.question)
        elif asked.is_suspect:
            self._given_up.append((asked.question, self._kind.gives_up(asked.question, death)))
        else:
            self._suspects[actor].append(asked.question)

    def _ask_suspects(self) -> None:
        busy = {one.actor for one in self._open.values() if one.is_suspect}
        for actor, waiting in enumerate(self._suspects):
            if waiting and actor not in busy:
                self._ask(actor, waiting.pop(0), is_suspect=True)

    def _first_asked(self) -> dict[str, _Open[Q]]:
        """What each actor that has not answered all was asked first, by its name."""
        return {one.name: one for one in reversed(self._open.values())}

    def _replace_silent(self) -> None:
        """Ask about every second who lives, and replace who is frozen. Raises ActorDied."""
        if self._clock() < self._looks_at_s:
            return
        self._looks_at_s = self._clock() + LOOK_S
        in_office = self._actors
        busy = {name: one for name, one in self._first_asked().items() if one.handle is in_office[one.actor]}
        self._heartbeat.keep(busy)
        for name, asked in busy.items():
            order, is_up = self._kind.order(asked.question), name in self._heard_of
            self._heartbeat.watch(name, asked.handle, order, is_up=is_up)
        try:
            self._heartbeat.look()
        except ActorDied as death:
            frozen = busy[death.name].handle
            for ref, asked in list(self._open.items()):
                if asked.handle is frozen:
                    del self._open[ref]
                    self._replace(asked, death)

    def _refuse_late(self) -> None:
        """Miss what each actor was asked first and has not answered. Raises WaitTimeout."""
        for name, asked in self._first_asked().items():
            asked.wait.look()
            # one that is silent besides may be frozen: the heartbeat tells, within its own limit
            if asked.wait.left_s > 0.0 or self._heartbeat.is_silent(name):
                continue
            raise WaitTimeout(
                waiter="the loop",
                waited_for=name,
                order=self._kind.order(asked.question),
                waited_s=asked.wait.waited_s,
                advice=self._kind.late_advice,
            )
