"""Instances, their messages and the scheduler's machine in one process and one thread, step by step.

Only frames travel on threads, as they do in an actor. A fault is a function that sees every message before it is
delivered and returns what arrives instead: nothing, the same, twice the same, or some of it `Later`. It may kill
instances and the scheduler, too.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from in_process import NO_FAULTS, FaultPlan, MemoryHub, MemoryTransport

from rlhfspec.actors.actor_messages import HeldSamples, PollReply
from rlhfspec.actors.generation.decode_loop import DecodeLoop
from rlhfspec.actors.generation.loop_orders import HoldOrder, MoveEventOrder, SubmitOrder
from rlhfspec.actors.migration.context import MigrationContext
from rlhfspec.actors.migration.migrator import Migrator
from rlhfspec.actors.migration.transfers import Transfers
from rlhfspec.core.config import ReallocationConfig
from rlhfspec.core.records import Completion, SampleKey, SampleRequest
from rlhfspec.engine.engine import Engine
from rlhfspec.policies.reallocation.pool_records import ReallocationPolicy
from rlhfspec.policies.scheduling.events import (
    Abandon,
    Alarm,
    Deliver,
    InstanceGone,
    InstanceJoined,
    InstanceReported,
    InstanceSnapshot,
    MoveEnded,
    MoveRecord,
    Order,
    SamplesArrived,
    SendVerdict,
    StartMove,
    Submit,
)
from rlhfspec.policies.scheduling.scheduler import Scheduler

Fault = Callable[[str, Any], list[Any]]
"(receiver, message) -> what arrives"
MAX_LOOKS = 50_000
"A transfer that is not over after so many looks at it hangs."
LOOK_S = 0.0005
NO_FAULT: Fault = lambda receiver, message: [message]  # noqa: E731


@dataclass(frozen=True, slots=True)
class Later:
    """A message that arrives so many turns later."""

    message: Any
    turns: int


class Host:
    """Holds an engine that has its weights."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.spot_trainer = None

    def load_weights(self, manifest, chunks):
        raise NotImplementedError


class CountedTransfers(Transfers):
    """Knows whose frames are under way."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.shipped: set[str] = set()
        self.sending: set[str] = set()
        self._numbers = itertools.count()
        self.awaited: set[tuple[str, str]] = set()

    def ship(self, destination, ticket, move_id, frames, lease, done) -> None:
        self.shipped.add(move_id)
        super().ship(destination, ticket, move_id, frames, lease, done)

    def receive(self, source, move_id, frames, done) -> None:
        def noted(pieces, error: str) -> None:
            done(pieces, error)
            self.awaited.discard((source, move_id))

        self.awaited.add((source, move_id))
        super().receive(source, move_id, frames, noted)

    def _run(self, direction, peer, job) -> None:
        """Count what is being sent, the frame that ends a wait for nothing included."""
        name = f"{peer}, job {next(self._numbers)}"

        def counted() -> None:
            try:
                job()
            finally:
                self.sending.discard(name)

        if direction == "to":
            self.sending.add(name)
        super()._run(direction, peer, counted)

    def join(self) -> None:
        """End the transfer threads of a closed instance."""
        for thread in self._threads.values():
            thread.shutdown(wait=True)


@dataclass(slots=True)
class LocalInstance:
    """One instance: its loop is turned by hand."""

    name: str
    engine: Engine
    loop: DecodeLoop
    migrator: Migrator
    transfers: CountedTransfers
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
        settings: ReallocationConfig | None = None,
        frame_timeout_s: float | None = None,
        frame_faults: FaultPlan = NO_FAULTS,
        fault: Fault = NO_FAULT,
        seconds_per_turn: float = 0.01,
    ) -> None:
        """`settings.timeout_s` is simulated time; `frame_timeout_s` is spent at the end of turns, waiting for frames.

        Neither passes while an instance decodes: how long that takes on a busy machine decides nothing.
        """
        self.fault = fault
        self.now_s = 0.0
        self.waited_s = 0.0
        self.num_turns = 0
        self.seconds_per_turn = seconds_per_turn
        self.reallocation = reallocation
        self.outcome = Outcome()
        self.requests: list[SampleRequest] = []
        self.term = 0
        self.machine = self.new_machine()
        self._scheduler_is_dead = False
        self._gone: list[str] = []
        self._planned: list[tuple[int, Callable[[], object]]] = []
        self.hub = MemoryHub()
        self._settings = settings or ReallocationConfig(
            timeout_s=2.0, frame_bytes=1 << 12, transfer_share=1.0
        )
        self._frame_timeout_s = frame_timeout_s or self._settings.timeout_s
        self._later: list[tuple[int, str, MoveEventOrder]] = []
        self.instances = {name: self._make(name, engine, frame_faults) for name, engine in engines.items()}
        for name in engines:
            self.join(name)

    @property
    def alive(self) -> list[LocalInstance]:
        """Instances that have not been killed."""
        return [instance for instance in self.instances.values() if instance.alive]

    def new_machine(self) -> Scheduler:
        return Scheduler(heartbeat_timeout_s=1e9, reallocation=self.reallocation, term=self.term)

    def add(self, name: str, engine: Engine) -> None:
        """A new instance joins."""
        self.instances[name] = self._make(name, engine, NO_FAULTS)
        self.join(name)

    def join(self, name: str) -> None:
        num_slots = self.instances[name].engine.runner.pool.num_slots
        self.handle(InstanceJoined(instance=name, num_slots=num_slots, now_s=self.now_s))

    def _make(self, name: str, engine: Engine, frame_faults: FaultPlan) -> LocalInstance:
        transport = MemoryTransport(
            self.hub, timeout_s=self._frame_timeout_s, faults=frame_faults, clock=lambda: self.waited_s
        )
        transfers = CountedTransfers(transport, self._settings)
        made: list[Migrator] = []

        def migrator(loop: DecodeLoop) -> Migrator:
            context = MigrationContext(
                instance=name,
                engine_or_none=lambda: engine,
                transfers=transfers,
                settings=self._settings,
                post=lambda peer, message, pieces: self.send(peer, message, sender=name, pieces=pieces),
                come_back=lambda event: loop.order(MoveEventOrder(event=event)),
                report=loop.report,
                open_epochs=loop.open_epochs,
                note=loop.spans.add,
                clock=lambda: self.now_s,
                wall_clock=lambda: self.now_s,
            )
            made.append(Migrator(context))
            return made[0]

        # a clock that a poll never waits for: every reading is a second later
        ticks = itertools.count().__next__
        loop = DecodeLoop(name, Host(engine), report_interval_s=0.0, clock=ticks, make_migrator=migrator)
        return LocalInstance(name, engine, loop, made[0], transfers)

    def send(self, receiver: str, message: Any, *, sender: str | None = None, pieces: tuple = ()) -> None:
        """Deliver a message of an instance, or of the scheduler in office, through the fault."""
        if sender is not None and not self.instances[sender].alive:
            return
        term = self.term if sender is None else None
        for arriving in self.fault(receiver, message):
            turns, event = (
                (arriving.turns, arriving.message) if isinstance(arriving, Later) else (0, arriving)
            )
            order = MoveEventOrder(event=event, term=term, pieces=pieces)
            if turns:
                self._later.append((self.num_turns + turns, receiver, order))
            else:
                self._deliver(receiver, order)

    def _deliver(self, receiver: str, order: MoveEventOrder) -> None:
        if self.instances[receiver].alive:
            self.instances[receiver].loop.order(order)

    def handle(self, event) -> None:
        self.carry_out(*self.machine.handle(event))

    def carry_out(self, *orders: Order) -> None:
        for order in orders:
            match order:
                case Submit():
                    submit = SubmitOrder(requests=order.requests, term=self.term)
                    self.instances[order.instance].loop.order(submit)
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
        """An instance dies: nothing of it is heard any more. The scheduler learns of it in the next turn."""
        if self.instances[name].alive:
            self.instances[name].alive = False
            self._gone.append(name)

    def kill_scheduler(self) -> None:
        """The scheduler dies; another takes over in the next turn."""
        self._scheduler_is_dead = True

    def after(self, turns: int, call: Callable[[], object]) -> None:
        """Call when so many more turns of the instances' loops are over."""
        self._planned.append((self.num_turns + turns, call))

    def run_once(self) -> None:
        """One step boundary and decode step of every instance, then a poll of each."""
        self.now_s += self.seconds_per_turn
        self.num_turns += 1
        due = [item for item in self._later if item[0] <= self.num_turns]
        self._later = [item for item in self._later if item[0] > self.num_turns]
        for _, receiver, order in due:
            self._deliver(receiver, order)
        for instance in self.alive:
            instance.loop.run_once(wait_s=0.0)
        for item in [item for item in self._planned if item[0] <= self.num_turns]:
            self._planned.remove(item)
            item[1]()
        gone, self._gone = self._gone, []
        for name in gone:
            # not before: it may have been killed in the middle of its own turn
            self.instances[name].transfers.close()
        if self._scheduler_is_dead:
            self._replace_scheduler()
        else:
            for name in gone:
                self.handle(InstanceGone(instance=name, reason="killed"))
            for instance in self.alive:
                if not self._scheduler_is_dead:
                    self._poll(instance)
            self.carry_out(*self.machine.reallocate(self.now_s))
        self._wait_for_transfers()

    def _replace_scheduler(self) -> None:
        """As `cluster.system.scheduler_client`: ask every instance what it holds, rebuild."""
        self.term += 1
        answers = {i.name: i.loop.order(HoldOrder(term=self.term)) for i in self.alive}
        for instance in self.alive:
            instance.loop.run_once(wait_s=0.0)
        held: dict[str, HeldSamples] = {name: future.result(timeout=0) for name, future in answers.items()}
        snapshots = [
            InstanceSnapshot(
                instance=name,
                num_slots=self.instances[name].engine.runner.pool.num_slots,
                open_epochs=one.open_epochs,
                completions=one.completions,
                set_aside=one.set_aside,
            )
            for name, one in held.items()
            if self.instances[name].alive
        ]
        for name, one in held.items():
            self.instances[name].acknowledged = one.sequence
        self._scheduler_is_dead = False
        self.machine, orders = Scheduler.rebuild(
            requests=self.requests,
            delivered=list(self.outcome.completions.values()),
            snapshots=snapshots,
            heartbeat_timeout_s=1e9,
            now_s=self.now_s,
            reallocation=self.reallocation,
            term=self.term,
        )
        self.carry_out(*orders)

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

    def _wait_for_transfers(self) -> None:
        """Frames come within a turn or not at all: how busy the machine is must not matter."""
        num_looks = 0
        transfers = [instance.transfers for instance in self.alive]
        shipped = {move_id for one in transfers for move_id in one.shipped}
        while any(
            one.sending or any(move_id in shipped for _, move_id in list(one.awaited)) for one in transfers
        ):
            waits = [(sorted(one.sending), sorted(one.awaited)) for one in transfers]
            num_looks += 1
            assert num_looks < MAX_LOOKS, f"frames are under way for ever: {waits}"
            time.sleep(LOOK_S)
            self.waited_s += LOOK_S

    def run(self, requests: list[SampleRequest], *, max_turns: int = 20_000) -> Outcome:
        """Generate all requests; fails when they do not all complete in so many turns."""
        self.requests = list(requests)
        self.handle(SamplesArrived(requests=tuple(requests)))
        for _ in range(max_turns):
            if len(self.outcome.completions) == len(requests):
                return self.outcome
            self.run_once()
        missing = len(requests) - len(self.outcome.completions)
        raise AssertionError(f"{missing} samples did not complete in {max_turns} turns")

    def settle(self, *, max_turns: int) -> int:
        """Turn until nothing of any move is left; return the turns it took, or fail after so many."""
        for run_once in range(max_turns):
            if not self.leftovers():
                return run_once
            self.run_once()
        raise AssertionError(f"after {max_turns} more turns there is still: {self.leftovers()}")

    def leftovers(self) -> list[str]:
        """What of moves is still open anywhere, in words."""
        moving = [request.key for request in self.requests if request.key in self.machine.moves]
        found = [f"the scheduler knows a move of {key}" for key in moving]
        for instance in self.alive:
            name, exchange = instance.name, instance.engine.exchange
            found += [f"{name} has set {key} aside" for key in instance.migrator.set_aside]
            found += [f"{name} has a move open"] * instance.migrator.is_busy
            found += [f"{name} has {exchange.num_reserved} slots reserved"] * bool(exchange.num_reserved)
            found += [f"{name} has a lease open"] * bool(exchange._leases._given)
            found += [f"{name} holds {key} open" for key in instance.loop.open_epochs]
            found += [f"{name} still has work"] * instance.engine.has_work
        return found

    def close(self) -> None:
        for instance in self.instances.values():
            instance.transfers.close()
        for instance in self.instances.values():
            instance.transfers.join()
