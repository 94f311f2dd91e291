"""The central scheduler as a pure state machine: events in, orders out; no clock, no threads, no Ray.

Laws: every sample is delivered exactly once each time that it is asked for (an evaluation asks for the same ones again,
under higher epochs: `core.records.EPOCHS_OF_A_ROUND`). A waiting sample is bound to an instance when a slot
frees there or soon will (pull; design 3.3), and a reallocation policy may move running ones. A sample
belongs to `(sample, epoch, owner)` (`policies.scheduling.ledger`): when its owner is lost it is queued again
under a higher epoch and recomputed from its prompt to the same tokens, because a rollout is a pure
function of weights, prompt and key (design 3.1). A report with a stale epoch is compared with the
accepted one and dropped; a difference is an integrity alarm (design 3.4).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from dataclasses import replace
from typing import Any

from ...core.awake import AwakeClock
from ...core.errors import RlhfSpecError
from ...core.records import ATTEMPT_EPOCH, Completion, SampleKey, SampleRequest, next_round
from ..migration.move_messages import MoveOutcome
from ..reallocation.pool_records import Move, ReallocationPolicy
from ..scaling.scaling_policy import ScalingPolicy
from ..scaling.scaling_records import Starts
from .accepted import Accepted, compare
from .attempts import AttemptCounts, Attempts
from .ending_samples import cut
from .events import (
    Alarm,
    AttemptsArrived,
    AttemptsEnd,
    ClockTicked,
    Cut,
    Deliver,
    Event,
    InstanceGone,
    InstanceJoined,
    InstanceLeaves,
    InstanceReported,
    InstanceSnapshot,
    MoveEnded,
    Order,
    Resized,
    SamplesArrived,
    StartMove,
)
from .leaving import let_go, moves_away
from .ledger import Binding, Ledger, verdict_for
from .look_ahead import LookAheadLaw
from .lost_instances import lose, lose_silent, why_stuck
from .members import InstanceState, Member, Members
from .open_samples import OpenSample, digest, is_whole
from .ownership import TAKEN_BACK_EPOCHS, OpenMoves
from .pool_view import pool_view

MOVE_TIMEOUT_S = 60.0
"A move of which nothing was heard for so long is called off and forgotten: a slot waits for it."
LONGEST_LOOK = 0.25
"Of the heartbeat timeout: what counts at most between two events; a scheduler that heard nothing for longer slept."


class Scheduler:
    """Admission, ownership and health of one pool of instances."""

    def __init__(
        self,
        *,
        heartbeat_timeout_s: float,
        binding: Binding = "pull",
        reallocation: ReallocationPolicy | None = None,
        scaling: ScalingPolicy | None = None,
        look_ahead: LookAheadLaw | None = None,
        term: int = 0,
    ) -> None:
        """A scheduler of no instances.

        Args:
            heartbeat_timeout_s: silence after which an instance is given up; to be ticked much more often.
            binding: pull, or static: the i-th sample belongs to the i-th instance from its arrival on, as in
                systems that split a batch up front; a baseline.
            reallocation: which running samples to move; None moves none.
            scaling: how many instances there should be; None: the pool's size is left as it is.
            look_ahead: how many attempts at the next batch run in slots that no sample wants; None: none.
            term: number of schedulers before this one in the run.
        """
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._clock = AwakeClock(longest_s=LONGEST_LOOK * heartbeat_timeout_s)
        self._reallocation = reallocation
        self._scaling = scaling
        self._starts, self._may_leave = Starts(), frozenset[str]()
        self._ledger = Ledger(binding=binding, prefix=f"{term}-")
        self._accepted = Accepted()
        self._attempts = Attempts(look_ahead)
        self._max_new_tokens = 1
        self._cut_keys: Set[SampleKey] = frozenset()
        self._is_cutting = self._is_settled = False
        "settled: nothing has happened since samples were bound that could bind another"

    @property
    def num_open(self) -> int:
        """Samples not yet delivered."""
        return len(self._ledger.samples)

    @property
    def num_waiting(self) -> int:
        """Open samples without an owner."""
        return len(self._ledger.waiting)

    @property
    def num_delivered(self) -> int:
        """Samples delivered so far."""
        return self._accepted.num_delivered

    @property
    def attempt_counts(self) -> AttemptCounts:
        """Of attempts, so far."""
        return self._attempts.counts

    @property
    def look_ahead(self) -> LookAheadLaw | None:
        """The law of attempts; to be read."""
        return self._attempts.law

    @property
    def awake_s(self) -> float:
        """Seconds of its clock at the last event, its own pauses left out; only differences mean something."""
        return self._ledger.now_s

    @property
    def members(self) -> Members:
        """The table of instances; to be read."""
        return self._ledger.members

    @property
    def moves(self) -> OpenMoves:
        """Moves that are ordered and not ended; to be read."""
        return self._ledger.moves

    def instances(self) -> dict[str, int]:
        """Instances that take samples and the number that each owns."""
        return {name: len(member.owned) for name, member in sorted(self.members.serving.items())}

    def open_samples(self) -> tuple[OpenSample, ...]:
        """The log of open samples in order of arrival."""
        return tuple(sorted(self._ledger.samples.values(), key=lambda sample: sample.arrival))

    def handle(self, event: Event) -> list[Order]:
        """Take one event, return the orders it gives rise to.

        Raises RlhfSpecError when a key arrives twice or an instance joins under a name that another had.
        """
        self._look_at_clock(getattr(event, "now_s", None))
        orders: list[Order] = []
        match event:
            case SamplesArrived():
                self._arrive(event.requests)
            case AttemptsArrived():
                self._attempts.announce(event.requests, self._ledger.samples)
            case AttemptsEnd():
                self._attempts.close()
            case InstanceJoined():
                self._join(event)
            case InstanceReported():
                orders = self._report(event)
                # a poll that tells of progress alone frees no slot: of a thousand instances most say no more
                self._is_settled &= not (orders or event.completions or event.moves)
            case InstanceGone():
                orders = lose(self._ledger, event.instance, event.reason)
            case InstanceLeaves():
                self._leave(event.instance, event.reason)
            case ClockTicked():
                orders = lose_silent(self._ledger, timeout_s=self._heartbeat_timeout_s)
            case Cut():
                self._is_cutting |= event.keys is None
                self._cut_keys |= event.keys or frozenset()
        if self._is_cutting or self._cut_keys:
            keys = None if self._is_cutting else self._cut_keys
            orders += cut(self._ledger, self._accepted, event, keys)
            self._is_cutting &= bool(self._ledger.samples)
            self._cut_keys &= self._ledger.samples.keys()
        if not (self._is_settled and isinstance(event, InstanceReported)):
            orders += self._ledger.pull() + let_go(self._ledger)
            # a report frees slots of its own instance, and moves those of others
            freed = [event.instance] if isinstance(event, InstanceReported) and not event.moves else None
            orders += [] if self._is_cutting else self._attempts.place(self._ledger, freed)
            self._is_settled = True
        if isinstance(event, ClockTicked):
            self._look_at_activity()
        return orders

    def expect(self, starts: Starts, may_leave: Collection[str]) -> None:
        """Take note of instances that start, and of those whose places can be given back."""
        self._starts, self._may_leave = starts, frozenset(may_leave)

    def reallocate(self, now_s: float) -> list[Order]:
        """Let the policies order moves and sizes, from what the last polls said."""
        self._look_at_clock(now_s)
        self._is_settled = False
        orders = self._ledger.forget_silent_moves(timeout_s=MOVE_TIMEOUT_S)
        self._look_at_activity()
        if self._scaling is not None:
            orders += self._resize(self._scaling)
        if self._reallocation is None or self._is_cutting:
            return orders
        orders += self._start(moves_away(self._ledger))
        view = pool_view(self._ledger, max_new_tokens=self._max_new_tokens)
        return orders + self._start(self._reallocation.plan(view))

    def _look_at_activity(self) -> None:
        for name, member in self.members.serving.items():
            has_samples = bool(member.owned) or self.moves.num_arriving(name) > 0
            member.look(has_samples=has_samples, now_s=self._ledger.now_s)

    def _resize(self, scaling: ScalingPolicy) -> list[Order]:
        if not self.members.serving:
            # the first ones are on their way, or the loop fills the pool up
            return []
        view = pool_view(self._ledger, max_new_tokens=self._max_new_tokens)
        change = scaling.plan(view, self._starts, may_leave=self._may_leave)
        if change is None:
            return []
        for name in change.leave:
            self._leave(name, change.reason)
        return [Resized(change=change), *let_go(self._ledger)]

    def _leave(self, instance: str, reason: str) -> None:
        """Give an instance no more samples; what was bound to it and has not begun is moved with the rest."""
        member = self.members.serving.get(instance)
        if member is not None:
            member.leaves_because = reason
            self.members.change(instance, InstanceState.LEAVING)

    def move(self, moves: Iterable[Move], *, now_s: float) -> list[Order]:
        """Order moves; one that is not possible any more is left out."""
        self._look_at_clock(now_s)
        return self._start(moves)

    def _start(self, moves: Iterable[Move]) -> list[Order]:
        return [
            StartMove(order=self._ledger.start_move(move, now_s=self._ledger.now_s))
            for move in moves
            if self._ledger.can_move(move)
        ]

    @classmethod
    def rebuild(
        cls,
        *,
        requests: Iterable[SampleRequest],
        delivered: Iterable[Completion],
        snapshots: Iterable[InstanceSnapshot],
        now_s: float,
        **settings: Any,
    ) -> tuple[Scheduler, list[Order]]:
        """A scheduler that goes on where a dead one stopped; `settings` as a new one takes them.

        `requests` are the samples the loop asked for since it last had all, `delivered` those of them it
        has already received, `snapshots` what the living instances hold; what they finished for earlier
        requests has been received, and is dropped. A sample that two instances hold under one epoch
        belongs to neither and starts again under a higher one. Instances without a snapshot must be
        ended before: what they hold is given to others.
        """
        machine = cls(**settings)
        machine._arrive(tuple(requests))
        for completion in delivered:
            del machine._ledger.samples[completion.key]
            machine._accepted.add(completion.key, completion.epoch, digest(completion))
        machine._look_at_clock(now_s)
        known = list(snapshots)
        for snapshot in known:
            machine._join(
                InstanceJoined(
                    instance=snapshot.instance, num_slots=snapshot.num_slots, now_s=now_s, link=snapshot.link
                )
            )
        for key, sample in machine._ledger.samples.items():
            machine._adopt(key, sample, known)
        machine._ledger.find_waiting()
        orders = machine._settle_what_was_set_aside(known)
        asked = set(machine._ledger.samples) | machine._accepted.keys()
        for snapshot in known:
            updates = tuple(c for c in snapshot.completions if c.key in asked)
            report = InstanceReported(instance=snapshot.instance, now_s=now_s, completions=updates)
            orders += machine._report(report)
        return machine, orders + machine._ledger.pull()

    def _look_at_clock(self, now_s: float | None) -> None:
        if now_s is not None:
            self._ledger.now_s = self._clock.read(now_s)

    def _arrive(self, requests: tuple[SampleRequest, ...]) -> None:
        self._accepted.let_go()
        for request in requests:
            accepted_epoch, _ = self._accepted.get(request.key) or (-1, "")
            if request.key in self._ledger.samples or request.epoch < next_round(accepted_epoch):
                raise RlhfSpecError(
                    f"sample {request.key} was handed to the scheduler twice; expected every sample index "
                    "once, or again under the epochs of a next asking; the data cursor must never reuse one"
                )
            self._accepted.ask_again(request.key)
            self._ledger.add(self._attempts.draft_for(request))
            self._max_new_tokens = max(self._max_new_tokens, request.sampling.max_new_tokens)

    def _join(self, event: InstanceJoined) -> None:
        if event.instance in self.members:
            raise RlhfSpecError(f"instance {event.instance} joined twice; a replacement needs a new name")
        self.members[event.instance] = Member(
            most_slots=event.num_slots,
            last_seen_s=self._ledger.now_s,
            since_s=self._ledger.now_s,
            link=event.link,
        )
        self.members.drop_gone()

    def _adopt(self, key: SampleKey, sample: OpenSample, snapshots: list[InstanceSnapshot]) -> None:
        held = [(s.open_epochs[key], s.instance, "") for s in snapshots if key in s.open_epochs]
        held += [(c.epoch, s.instance, "") for s in snapshots for c in s.completions if c.key == key]
        # a copy that was set aside counts where nobody holds a newer one
        held += [
            (s.set_aside[key][1], s.instance, s.set_aside[key][0]) for s in snapshots if key in s.set_aside
        ]
        held = [copy for copy in held if copy[0] >= sample.first_epoch]
        newest = max((epoch for epoch, _, _ in held), default=-1)
        holders = {(instance, move_id) for epoch, instance, move_id in held if epoch == newest}
        epoch = max(newest, sample.request.epoch) + 1
        if len(holders) == 1:
            ((sample.owner, sample.taken_back),) = holders
            self.members[sample.owner].owned[key] = sample
            # the destination may hold the next one in a message that is still on its way
            epoch = newest + (TAKEN_BACK_EPOCHS if sample.taken_back else 0)
        sample.was_moved = any(move_id for _, _, move_id in held)
        sample.request = replace(sample.request, epoch=epoch)

    def _settle_what_was_set_aside(self, snapshots: list[InstanceSnapshot]) -> list[Order]:
        """Tell every source whose hand-over was not settled whether the sample is its own again."""
        orders: list[Order] = []
        for snapshot in snapshots:
            for key, (move_id, _) in snapshot.set_aside.items():
                sample = self._ledger.samples.get(key)
                owns = sample is not None and sample.taken_back == move_id
                orders.append(
                    verdict_for(snapshot.instance, move_id, key, sample.request.epoch if sample else 0, owns)
                )
        return orders

    def _report(self, event: InstanceReported) -> list[Order]:
        member = self.members.serving.get(event.instance)
        if member is not None:
            num_slots, member.load = member.num_slots, event.load or member.load
            self._is_settled &= num_slots == member.num_slots
            member.is_training = event.is_training
            if reason := why_stuck(self._ledger, event, timeout_s=self._heartbeat_timeout_s):
                return lose(self._ledger, event.instance, reason)
            member.last_seen_s = self._ledger.now_s
            samples = self._ledger.samples
            for key, num_tokens in event.progress.items():
                if (sample := samples.get(key)) is not None and sample.owner == event.instance:
                    sample.num_tokens = num_tokens
        orders: list[Order] = []
        for report in event.moves:
            orders += self._ledger.rule(event.instance, report)
        self._learn_from(orders)
        for completion in event.completions:
            orders += self._complete(event.instance, completion)
        return orders

    def _learn_from(self, orders: list[Order]) -> None:
        """Let the policy know what moves have cost."""
        for order in orders:
            if self._reallocation is None or not isinstance(order, MoveEnded):
                continue
            metrics = order.record.metrics
            if metrics.get("computed_tokens"):
                self._reallocation.note_prefill(
                    num_tokens=int(metrics["computed_tokens"]), seconds=metrics["attach_s"]
                )
            elif "stage1_s" in metrics:
                self._reallocation.note_transfer(
                    num_bytes=int(metrics["stage1_bytes"] + metrics["stage2_bytes"]),
                    seconds=metrics["stage1_s"] + metrics["downtime_s"],
                    cold=bool(metrics["was_cold"]),
                )

    def _complete(self, instance: str, completion: Completion) -> list[Order]:
        key, epoch = completion.key, completion.epoch
        if epoch == ATTEMPT_EPOCH:
            self._attempts.take(instance, completion)
            return []
        if (accepted := self._accepted.get(key)) is not None:
            is_of_another_round = next_round(epoch) != next_round(accepted[0])
            return [] if is_of_another_round else compare(accepted, key, instance, epoch, digest(completion))
        sample = self._ledger.samples.get(key)
        if sample is None and self._accepted.is_forgotten(key):
            return []
        if sample is None:
            return [Alarm(key=key, instance=instance, epoch=epoch, what="a sample nobody asked for")]
        if epoch < sample.first_epoch:
            return []
        move = self._ledger.moves.of(key)
        is_uncommitted = move is not None and (instance, epoch) == (move.destination, move.epoch + 1)
        if epoch < sample.request.epoch or is_uncommitted:
            sample.stale.append((epoch, instance, digest(completion)))
            return []
        if epoch > sample.request.epoch or sample.owner != instance:
            what = f"reported under epoch {epoch}; its owner is {sample.owner}, epoch {sample.request.epoch}"
            return [Alarm(key=key, instance=instance, epoch=epoch, what=what)]
        del self.members[instance].owned[key]
        delivered = (epoch, digest(completion))
        self._accepted.add(key, *delivered)
        self._attempts.compare(sample.request, completion)
        for policy in (self._reallocation, self._scaling):
            # lengths that forecasts go by are those of whole responses
            if policy is not None and is_whole(sample.request, completion):
                policy.note_finished(completion.num_tokens)
        orders: list[Order] = [Deliver(completion=completion)]
        orders += self._ledger.end_move(key, MoveOutcome.KEPT, "finished before it left")
        for stale_epoch, stale_instance, stale_digest in self._ledger.samples.pop(key).stale:
            orders += compare(delivered, key, stale_instance, stale_epoch, stale_digest)
        return orders
