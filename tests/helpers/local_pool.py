"""Instances, their messages and the scheduler's machine in one process and one thread, step by step.

Only frames travel on threads, as they do in an actor. A fault is a function that sees every message before it is
delivered and returns what arrives instead: nothing, the same, or twice the same.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actors.decode_loop import DecodeLoop, NewsOrder, SubmitOrder
from actors.messages import PollReply
from actors.migration.desk import Desk
from actors.migration.migrator import Migrator
from actors.migration.settings import MigrationSettings
from actors.migration.transfers import Transfers
from actors.transport.memory import NO_FAULTS, FaultPlan, MemoryHub, MemoryTransport
from core.records import Completion, SampleKey, SampleRequest
from engine.generator import Engine
from policies.reallocation.records import ReallocationPolicy
from policies.scheduler import Scheduler
from policies.scheduler_records import (
    Abandon,
    Alarm,
    Deliver,
    InstanceGone,
    InstanceJoined,
    InstanceReported,
    MoveEnded,
    MoveRecord,
    Order,
    SamplesArrived,
    SendVerdict,
    StartMove,
    Submit,
)

Fault = Callable[[str, Any], list[Any]]
"(receiver, message) -> what arrives"


class Host:
    """Holds an engine that has its weights."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def load_weights(self, manifest, chunks):
        raise NotImplementedError


@dataclass(slots=True)
class LocalInstance:
    """One instance: its loop is turned by hand."""

    name: str
    engine: Engine
    loop: DecodeLoop
    transfers: Transfers
    acknowledged: int = 0
    alive: bool = True


@dataclass(slots=True)
class Outcome:
    """What came out of a run."""

    completions: dict[SampleKey, Completion] = field(default_factory=dict)
    moves: list[MoveRecord] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    delivered_twice: list[SampleKey] = field(default_factory=list)


class LocalPool:
    """A pool under one scheduler machine."""

    def __init__(
        self,
        engines: dict[str, Engine],
        *,
        reallocation: ReallocationPolicy | None = None,
        settings: MigrationSettings | None = None,
        frame_faults: FaultPlan = NO_FAULTS,
        fault: Fault = lambda receiver, message: [message],
        seconds_per_turn: float = 0.01,
    ) -> None:
        self.fault = fault
        self.now_s = 0.0
        self.seconds_per_turn = seconds_per_turn
        self.reallocation = reallocation
        self.outcome = Outcome()
        self.term = 0
        self.machine = self.new_machine()
        self._hub = MemoryHub()
        self._settings = settings or MigrationSettings(timeout_s=2.0, frame_bytes=1 << 12, transfer_share=1.0)
        self.instances = {name: self._make(name, engine, frame_faults) for name, engine in engines.items()}
        self.late: deque[tuple[float, str, Any]] = deque()
        for name, instance in self.instances.items():
            self.handle(
                InstanceJoined(
                    instance=name, num_slots=instance.engine.runner.pool.num_slots, now_s=self.now_s
                )
            )

    def new_machine(self) -> Scheduler:
        return Scheduler(heartbeat_timeout_s=1e9, reallocation=self.reallocation, term=self.term)

    def _make(self, name: str, engine: Engine, frame_faults: FaultPlan) -> LocalInstance:
        transport = MemoryTransport(self._hub, timeout_s=self._settings.timeout_s, faults=frame_faults)
        transfers = Transfers(transport, self._settings)

        def door(loop: DecodeLoop) -> Migrator:
            desk = Desk(
                instance=name,
                engine_or_none=lambda: engine,
                transfers=transfers,
                settings=self._settings,
                post=self.send,
                come_back=lambda news: loop.order(NewsOrder(news=news)),
                report=loop.report,
                open_epochs=loop.open_epochs,
                note=loop.spans.add,
                clock=lambda: self.now_s,
                wall_clock=lambda: self.now_s,
            )
            return Migrator(desk)

        loop = DecodeLoop(name, Host(engine), publish_interval_s=0.0, make_door=door)
        return LocalInstance(name, engine, loop, transfers)

    def send(self, receiver: str, message: Any) -> None:
        """Deliver a message between instances or from the scheduler, through the fault."""
        for arriving in self.fault(receiver, message):
            if self.instances[receiver].alive:
                self.instances[receiver].loop.order(NewsOrder(news=arriving))

    def handle(self, event) -> None:
        for order in self.machine.handle(event):
            self.carry_out(order)

    def carry_out(self, order: Order) -> None:
        match order:
            case Submit():
                self.instances[order.instance].loop.order(SubmitOrder(requests=order.requests))
            case Deliver():
                key = order.completion.key
                if key in self.outcome.completions:
                    self.outcome.delivered_twice.append(key)
                self.outcome.completions[key] = order.completion
            case StartMove():
                self.send(order.order.source, order.order)
            case SendVerdict():
                self.send(order.instance, order.verdict)
            case MoveEnded():
                self.outcome.moves.append(order.record)
            case Alarm():
                self.outcome.alarms.append(order)
            case Abandon():
                pass

    def kill(self, name: str) -> None:
        """An instance dies: nothing of it is heard any more."""
        self.instances[name].alive = False
        self.instances[name].transfers.close()
        self.handle(InstanceGone(instance=name, reason="killed"))

    def turn(self) -> None:
        """One step boundary and decode step of every instance, then a poll of each."""
        self.now_s += self.seconds_per_turn
        for instance in self.instances.values():
            if instance.alive:
                instance.loop.turn(wait_s=0.0)
        for instance in self.instances.values():
            if instance.alive:
                self._poll(instance)
        for order in self.machine.reallocate(self.now_s):
            self.carry_out(order)

    def _poll(self, instance: LocalInstance) -> None:
        reply: PollReply = instance.loop.poll(acknowledged=instance.acknowledged, wait_s=0.0)
        instance.acknowledged = reply.sequence
        self.handle(
            InstanceReported(
                instance=instance.name,
                now_s=self.now_s,
                completions=reply.completions,
                progress=reply.progress,
                load=reply.load,
                moves=reply.moves,
            )
        )

    def run(self, requests: list[SampleRequest], *, max_turns: int = 20_000) -> Outcome:
        """Generate all requests; fails when they do not all complete in so many turns."""
        self.handle(SamplesArrived(requests=tuple(requests)))
        for _ in range(max_turns):
            if len(self.outcome.completions) == len(requests):
                return self.outcome
            self.turn()
            if not any(i.engine.has_work for i in self.instances.values() if i.alive):
                time.sleep(0.001)
        missing = len(requests) - len(self.outcome.completions)
        raise AssertionError(f"{missing} samples did not complete in {max_turns} turns")

    def close(self) -> None:
        for instance in self.instances.values():
            instance.transfers.close()
        for thread in threading.enumerate():
            if thread.name.startswith("transfer-"):
                thread.join(timeout=5.0)
