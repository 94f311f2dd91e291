"""Scheduler actor: the shell around the state machine in `policies.scheduling.scheduler`.

One thread keeps one poll in flight to every instance and never waits for a particular one; a poll
answers at once when a sample finishes there, else after the poll interval. Completions come with the
poll and go out through `take`. An instance that dies, or answers no poll for the heartbeat timeout
(Ray never notices a frozen process), is given up; the loop makes the replacement. What this process itself
slept through counts for nobody. The loop also replaces this actor: `rebuild` takes over what a dead one knew.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayTaskError

from ...core.errors import InstanceLost, WaitTimeout
from ...core.records import Completion, SampleKey, SampleRequest
from ...policies.migration.move_messages import CallOff, MoveOrder, Settle
from ...policies.reallocation.pool_records import Move
from ...policies.scaling.scaling_records import Starts
from ...policies.scheduling.events import (
    Abandon,
    Alarm,
    AttemptsArrived,
    AttemptsEnd,
    ClockTicked,
    Cut,
    CutOwned,
    Deliver,
    Event,
    InstanceGone,
    InstanceJoined,
    InstanceLeaves,
    InstanceReported,
    InstanceSnapshot,
    Left,
    MoveEnded,
    Order,
    Resized,
    SamplesArrived,
    SendVerdict,
    StartMove,
    Submit,
)
from ...policies.scheduling.scheduler import Scheduler
from ..actor_messages import InstanceView, LostInstance, PollReply, Rejoined, SchedulerSettings, Taken
from ..remote import run_metrics
from ..remote.actor_start import begin_actor, set_heap_aside
from ..remote.deaths import DEATHS, cause_of
from ..remote.remote import Handle, remote
from ..remote.waiting import own_error, wait_any
from .scheduler_updates import SchedulerUpdates, count_move, instance_views

IDLE_POLL_S = 1.0
"An instance without samples, or none of whose samples can move, is polled for its heartbeat only."

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Link:
    """How an instance is reached; a row of the machine's table holds it."""

    handle: Handle
    acknowledged: int = 0
    is_polled: bool = False
    drafter_alarm: str = ""
    "told last; it is not told again after silence"


@remote(max_restarts=0, concurrency_groups={"control": 3, "take": 1})
class SchedulerActor:
    """The central scheduler of one run."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._name = begin_actor("scheduler")
        self._settings = settings
        self._machine = Scheduler(**self._machine_arguments())
        self._asked: dict[Any, str] = {}  # whose answer, of a poll or a submit
        self._changed = threading.Condition(threading.RLock())
        self._updates = SchedulerUpdates()
        self._reallocated_at_s = 0.0
        self._planning_s = 0.0
        self._failure: BaseException | None = None
        self._stopping = False
        self._progress_mark = (0, 0)
        self._progress_at_s = self._machine.awake_s
        set_heap_aside()

    def _machine_arguments(self) -> dict[str, Any]:
        # arrays that came through the object store are read-only, and policies learn
        settings, policies = self._settings, ("reallocation", "scaling", "look_ahead")
        return {
            "heartbeat_timeout_s": settings.heartbeat_timeout_s,
            "binding": settings.binding,
            "term": settings.term,
            **{name: copy.deepcopy(getattr(settings, name)) for name in policies},
        }

    def __repr__(self) -> str:
        # asked, too, where what it was to be made with cannot be read: that is said then
        return f"SchedulerActor({vars(self).get('_name', 'not made')})"

    def run(self) -> None:
        """Poll until told to stop; the caller keeps the reference as a death sentinel."""
        while not self._stopping:
            refs = self._refs_in_flight()
            if not refs:
                time.sleep(self._settings.poll_interval_s)
            for ref in wait_any(refs, timeout_s=self._settings.poll_interval_s):
                self._take_answer(ref)
            now_s = time.monotonic()
            self._handle(ClockTicked(now_s=now_s))
            if now_s - self._reallocated_at_s >= self._settings.reallocation_interval_s:
                self._reallocate(now_s)
            self._check_for_stall()

    @ray.method(concurrency_group="control")
    def join(self, instance: str, handle: Handle, num_slots: int) -> None:
        """Add an instance whose weights have been confirmed."""
        now_s, link = time.monotonic(), _Link(handle=handle)
        with self._changed:
            self._handle(InstanceJoined(instance=instance, num_slots=num_slots, now_s=now_s, link=link))
            self._progress_at_s = self._machine.awake_s

    @ray.method(concurrency_group="control")
    def lose(self, instance: str, reason: str) -> str:
        """Give an instance up, where a weight load failed, say; why it is lost, which may have been seen here first."""
        with self._changed:
            self._handle(InstanceGone(instance=instance, reason=reason))
            return {lost.instance: lost.reason for lost in self._updates.lost}.get(instance, reason)

    @ray.method(concurrency_group="control")
    def leave(self, instance: str, reason: str) -> None:
        """Empty an instance; `take` tells when it may be ended."""
        self._handle(InstanceLeaves(instance=instance, reason=reason))

    @ray.method(concurrency_group="control")
    def expect(self, starts: Starts, may_leave: tuple[str, ...]) -> None:
        """Take note of instances that start, and of those whose places can be given back."""
        with self._changed:
            self._machine.expect(starts, may_leave)

    @ray.method(concurrency_group="control")
    def enqueue(self, requests: tuple[SampleRequest, ...]) -> None:
        """Take new samples; they complete through `take`."""
        with self._changed:
            self._progress_at_s = self._machine.awake_s
            self._handle(SamplesArrived(requests=requests))

    @ray.method(concurrency_group="control")
    def look_ahead(self, requests: tuple[SampleRequest, ...]) -> None:
        """Take note of the next batch's samples, which may be begun in free slots; of none: new weights come."""
        self._handle(AttemptsArrived(requests=requests) if requests else AttemptsEnd())

    @ray.method(concurrency_group="control")
    def cut(self, keys: frozenset[SampleKey] | None = None) -> None:
        """End samples where they are, without `keys` all that are open; they complete through `take`, cut."""
        self._handle(Cut(keys=keys))

    @ray.method(concurrency_group="control")
    def rebuild(
        self,
        requests: tuple[SampleRequest, ...],
        delivered: tuple[Completion, ...],
        rejoined: tuple[Rejoined, ...],
    ) -> None:
        """Go on where a dead scheduler stopped; to be called before `run` and instead of `join`."""
        snapshots = [
            InstanceSnapshot(
                instance=one.held.instance,
                num_slots=one.num_slots,
                open_epochs=one.held.open_epochs,
                completions=one.held.completions,
                set_aside=one.held.set_aside,
                link=_Link(handle=one.handle, acknowledged=one.held.sequence),
            )
            for one in rejoined
        ]
        with self._changed:
            self._machine, orders = Scheduler.rebuild(
                requests=requests,
                delivered=delivered,
                snapshots=snapshots,
                now_s=time.monotonic(),
                **self._machine_arguments(),
            )
            self._progress_at_s = self._machine.awake_s
            self._carry_out(orders)

    @ray.method(concurrency_group="control")
    def instances(self) -> Mapping[str, int]:
        """Living instances and the samples each owns."""
        with self._changed:
            return self._machine.instances()

    @ray.method(concurrency_group="control")
    def views(self) -> tuple[InstanceView, ...]:
        """Every instance that ever joined, as this scheduler sees it now; for people."""
        with self._changed:
            return instance_views(self._machine.members, now_s=time.monotonic())

    @ray.method(concurrency_group="control")
    def move(self, moves: tuple[Move, ...]) -> None:
        """Order moves by hand; one that is not possible is left out."""
        with self._changed:
            self._carry_out(self._machine.move(moves, now_s=time.monotonic()))

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """End the polling."""
        self._stopping = True

    @ray.method(concurrency_group="take")
    def take(self, wait_s: float, gathers: bool = False) -> Taken:
        """Return the updates since the last call, waiting up to `wait_s` for some, or to gather completions.

        Raises what made generation impossible: an error of ours that an instance raised, or WaitTimeout.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._updates.is_urgent(gathers and self._machine.num_open > 0) or self._failure,
                timeout=wait_s,
            )
            if self._failure is not None:
                raise self._failure
            updates, self._updates = self._updates, SchedulerUpdates()
            return updates.taken(planning_s=self._planning_s, machine=self._machine)

    def _refs_in_flight(self) -> list[Any]:
        """Start a poll where none is in flight; return all references that may answer."""
        with self._changed:
            serving, settings = self._machine.members.serving, self._settings
            # what ends there is told at once; how far samples are matters where they may move
            may_move = settings.scaling is not None or (settings.reallocation and len(serving) > 1)
            for name, member in serving.items():
                link: _Link = member.link
                if not link.is_polled:
                    wait_s = settings.poll_interval_s if member.owned and may_move else IDLE_POLL_S
                    self._asked[link.handle.poll.remote(link.acknowledged, wait_s)] = name
                    link.is_polled = True
            return list(self._asked)

    def _take_answer(self, ref: Any) -> None:
        with self._changed:
            name = self._asked.pop(ref)
            if name not in self._machine.members.serving:
                return
            try:
                answer = ray.get(ref)
            except DEATHS as error:
                self._handle(InstanceGone(instance=name, reason=f"died: {cause_of(error)}"))
            except RayTaskError as error:
                if isinstance(why := own_error(error), InstanceLost):
                    self._handle(InstanceGone(instance=name, reason=str(why)))
                else:
                    self._fail(why)
            else:
                if isinstance(answer, PollReply):
                    self._take_reply(name, answer)

    def _take_reply(self, name: str, reply: PollReply) -> None:
        link: _Link = self._machine.members[name].link
        link.is_polled, link.acknowledged = False, reply.sequence
        if reply.load is not None and reply.load.drafter_alarm not in ("", link.drafter_alarm):
            link.drafter_alarm = reply.load.drafter_alarm
            self._updates.drafter_alarms.append(f"{name}: {link.drafter_alarm}")
        self._handle(
            InstanceReported(
                instance=name,
                now_s=time.monotonic(),
                completions=reply.completions,
                progress=reply.progress,
                load=reply.load,
                moves=reply.moves,
                boundary=reply.boundary,
                busy_s=reply.busy_s,
                is_training=reply.is_training,
            )
        )

    def _reallocate(self, now_s: float) -> None:
        with self._changed:
            self._reallocated_at_s, began_s = now_s, time.monotonic()
            self._carry_out(self._machine.reallocate(now_s))
            self._planning_s += time.monotonic() - began_s

    def _handle(self, event: Event) -> None:
        with self._changed:
            self._carry_out(self._machine.handle(event))

    def _carry_out(self, orders: Iterable[Order]) -> None:
        """Do what the machine says; what concerns moves goes to each instance in one call."""
        moves: dict[str, list[MoveOrder]] = {}
        verdicts: dict[str, list[Settle | CallOff]] = {}
        for order in orders:
            match order:
                case StartMove():
                    moves.setdefault(order.order.source, []).append(order.order)
                case SendVerdict():
                    verdicts.setdefault(order.instance, []).append(order.verdict)
                case _:
                    self._carry_out_one(order)
        for name, words in verdicts.items():
            if name in self._machine.members.serving:
                self._handle_of(name).settle.remote(tuple(words), self._settings.term)
        for source, started in moves.items():
            destinations = {order.destination: self._handle_of(order.destination) for order in started}
            self._handle_of(source).move_out.remote(tuple(started), destinations, self._settings.term)

    def _handle_of(self, instance: str) -> Handle:
        return self._machine.members[instance].link.handle

    def _carry_out_one(self, order: Order) -> None:
        match order:
            case Submit():
                ref = self._handle_of(order.instance).submit.remote(
                    order.requests, self._settings.order_timeout_s, self._settings.term
                )
                self._asked[ref] = order.instance
            case CutOwned():
                self._handle_of(order.instance).cut.remote(order.keys, self._settings.term)
            case Deliver():
                self._updates.completions.append(order.completion)
                if len(self._updates.completions) == 1 or not self._machine.num_open:
                    # who gathers is not woken between the first and the last
                    self._changed.notify_all()
            case Abandon():
                self._abandon(order)
            case Left():
                self._updates.left.append(order)
                self._changed.notify_all()
            case Resized():
                self._updates.resized = order.change
            case MoveEnded():
                self._updates.moves.append(order.record)
                count_move(order.record)
            case Alarm():
                logger.error("integrity alarm: %s", order)
                run_metrics.add("integrity_alarms")
                self._updates.alarms.append(order)

    def _abandon(self, order: Abandon) -> None:
        logger.warning("%s is given up: %s", order.instance, order.reason)
        ray.kill(self._handle_of(order.instance))
        self._updates.lost.append(
            LostInstance(instance=order.instance, reason=order.reason, num_requeued=order.num_requeued)
        )
        self._changed.notify_all()

    def _check_for_stall(self) -> None:
        """Fail when samples are open and none has moved for the order timeout: nobody may hang."""
        with self._changed:
            now_s = self._machine.awake_s
            emitted = sum(stats.num_emitted_tokens for stats in self._machine.members.stats.values())
            mark = (emitted, self._machine.num_delivered)
            # without an instance they wait for one, as long as the loop lets them
            is_idle = self._machine.num_open == 0 or not self._machine.members.serving
            if mark != self._progress_mark or is_idle:
                self._progress_mark, self._progress_at_s = mark, now_s
            waited_s = now_s - self._progress_at_s
            if waited_s <= self._settings.order_timeout_s or self._failure is not None:
                return
            oldest = self._machine.open_samples()[0]
            self._fail(
                WaitTimeout(
                    waiter=f"the scheduler ({self._machine.num_open} open samples)",
                    waited_for=oldest.owner
                    or f"a free slot on {list(self._machine.members.serving) or 'no instance'}",
                    order=f"sample {oldest.request.key.sample_index}, epoch {oldest.request.epoch}",
                    waited_s=waited_s,
                    advice="look at the instance's log in the Ray dashboard",
                )
            )

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.notify_all()
