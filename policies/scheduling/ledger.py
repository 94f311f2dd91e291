"""The scheduler's log of open samples and its table of instances, and who owns what.

Binding and moves change an owner here, losses by `lost_instances.py`. Epochs only grow.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Literal

from ...core.records import SampleKey, SampleRequest
from ..migration.move_messages import (
    CallOff,
    Claim,
    MoveOrder,
    MoveOutcome,
    MoveReport,
    Settle,
    Verdict,
)
from ..reallocation.pool_records import Move
from .events import MoveEnded, Order, SendVerdict, Submit
from .members import Members
from .open_samples import OpenSample
from .ownership import (
    TAKEN_BACK_EPOCHS,
    OpenMoves,
    Ruling,
    rule_on_commit,
    rule_on_take_back,
)

Binding = Literal["pull", "static"]
GOES_ON = 1 << 62
"Arrivals by which an episode's later turn is ahead of samples that have not begun: its caches wait for it."
AHEAD_SHARE = 4
"A fourth of its slots is how many samples an instance may have in line while the scheduler's own line is long."


class Ledger:
    """Open samples, those without an owner, instances, open moves."""

    def __init__(self, *, binding: Binding, prefix: str) -> None:
        """`prefix` makes the names of moves unique in a run."""
        self.samples: dict[SampleKey, OpenSample] = {}
        self.waiting: list[tuple[int, SampleKey]] = []
        "a heap by arrival"
        self.members = Members()
        self.moves = OpenMoves(prefix=prefix)
        self.now_s = 0.0
        self._binding = binding
        self._num_arrived = 0

    def add(self, request: SampleRequest) -> None:
        """Note a new sample, or a turn of one: what goes on is ahead of what has not begun."""
        arrival = self._num_arrived - (GOES_ON if request.key.turn else 0)
        self.samples[request.key] = OpenSample(arrival=arrival, request=request, first_epoch=request.epoch)
        heapq.heappush(self.waiting, (arrival, request.key))
        self._num_arrived += 1

    def can_move(self, move: Move) -> bool:
        """True when the sample is where the move says, is not being moved, and a slot is free for it."""
        sample, target = self.samples.get(move.key), self.members.admitting.get(move.destination)
        if sample is None or target is None or sample.owner != move.source or move.key in self.moves:
            return False
        if move.source == move.destination:
            return False
        return len(target.owned) + self.moves.num_arriving(move.destination) < target.num_slots

    def start_move(self, move: Move, *, now_s: float) -> MoveOrder:
        """Note that a sample is being moved; it belongs to its source until the destination commits."""
        sample = self.samples[move.key]
        sample.was_moved = True
        return self.moves.start(move, epoch=sample.request.epoch, now_s=now_s)

    def forget_silent_moves(self, *, timeout_s: float) -> list[Order]:
        """End moves of which nothing was heard for too long: the destination's slot is free again."""
        orders: list[Order] = []
        for order in self.moves.silent(self.now_s, timeout_s=timeout_s):
            why = (
                f"the scheduler waited {timeout_s:.0f} s for {order.source} and {order.destination} to end it"
            )
            orders += self.end_move(order.key, MoveOutcome.LOST, why)
            call_off = CallOff(move_id=order.move_id, reason=why)
            orders += self.if_alive(order.source, SendVerdict(instance=order.source, verdict=call_off))
        return orders

    def end_move(
        self, key: SampleKey, outcome: MoveOutcome, why: str, metrics: dict[str, float] | None = None
    ) -> list[MoveEnded]:
        """End a sample's move, if it is being moved."""
        return self.moves.end(key, outcome, why, now_s=self.now_s, metrics=metrics)

    def find_waiting(self) -> None:
        """Queue exactly the samples without an owner."""
        self.waiting = [(s.arrival, key) for key, s in self.samples.items() if s.owner is None]
        heapq.heapify(self.waiting)

    def pull(self) -> list[Order]:
        """Bind waiting samples, oldest first, each to the instance that owns fewest.

        A few more than it has slots, so that a slot does not stand empty until the scheduler hears of it; never so
        many that another instance may run dry: the fewer wait here, the fewer wait there.
        """
        if not self.waiting:
            return []
        given: dict[str, list[SampleRequest]] = {}
        members, static = self.members.admitting, self._binding == "static"
        arriving, in_order = self.moves.arriving, sorted(members) if static else []
        load = {name: len(m.owned) + arriving[name] for name, m in members.items()}
        slots = {name: m.num_slots for name, m in members.items()}

        def has_room(name: str) -> bool:
            spare = len(self.waiting) // (2 * max(len(members), 1))
            return static or load[name] < slots[name] + min(slots[name] // AHEAD_SHARE, spare)

        # loads only grow here and room only shrinks: an entry that is out of date comes up too early, never too late
        most = {
            n: n + min(n // AHEAD_SHARE, len(self.waiting) // (2 * max(len(members), 1)))
            for n in {*slots.values()}
        }
        emptiest = [(num, name) for name, num in load.items() if static or num < most[slots[name]]]
        heapq.heapify(emptiest)
        while self.waiting and emptiest:
            known, name = emptiest[0]
            if not has_room(name):
                heapq.heappop(emptiest)
                continue
            if known != load[name]:
                heapq.heapreplace(emptiest, (load[name], name))
                continue
            arrival, key = self.waiting[0]
            request = self.samples[key].request
            # which may hold its caches
            home = request.history.instance if request.history is not None else ""
            if home in members and has_room(home):
                name = home
            elif static and request.epoch == self.samples[key].first_epoch:
                name = in_order[arrival % len(members)]
            heapq.heappop(self.waiting)
            self.samples[key].owner = name
            members[name].owned[key] = self.samples[key]
            load[name] += 1
            given.setdefault(name, []).append(request)
        return [Submit(instance=name, requests=tuple(requests)) for name, requests in given.items()]

    def queue_again(self, key: SampleKey) -> None:
        """Let a sample start anew, under an epoch that no copy of it can have."""
        sample = self.samples[key]
        sample.owner, sample.num_tokens = None, 0
        num_epochs = TAKEN_BACK_EPOCHS if sample.was_moved else 1
        sample.request = replace(sample.request, epoch=sample.request.epoch + num_epochs)
        heapq.heappush(self.waiting, (sample.arrival, key))

    def rule(self, instance: str, report: MoveReport) -> list[Order]:
        """Decide what an instance claims of a move, and tell whom it concerns.

        An instance that was given up claims nothing any more: what it held is another's.
        """
        if instance not in self.members.serving:
            return []
        sample, key = self.samples.get(report.key), report.key
        epoch, owner = (sample.request.epoch, sample.owner) if sample else (0, None)
        is_ours = self.moves.ordered(report.move_id)
        match report.claim:
            case Claim.COMMIT:
                ruling = rule_on_commit(report, epoch=epoch, owner=owner, is_ours=is_ours)
                if ruling is Ruling.GRANTED:
                    self._give(key, report.destination, report.epoch)
                # a denial tells the owner's epoch: a newer copy that the claimant owns by now is not meant
                owned_epoch = epoch if ruling is Ruling.DENIED else report.epoch
                orders = [_verdict_on(instance, report, ruling, owned_epoch)]
                if ruling is Ruling.GRANTED:
                    orders += self.if_alive(
                        report.source, verdict_for(report.source, report.move_id, key, report.epoch, False)
                    )
                    orders += self._end(report, MoveOutcome.MOVED)
                return orders
            case Claim.TAKE_BACK:
                taken_back = sample.taken_back if sample else ""
                ruling = rule_on_take_back(
                    report, epoch=epoch, owner=owner, taken_back=taken_back, is_ours=is_ours
                )
                if ruling is Ruling.GRANTED:
                    epoch += TAKEN_BACK_EPOCHS
                    self._give(key, report.source, epoch)
                    self.samples[key].taken_back = report.move_id
                orders = [_verdict_on(instance, report, ruling, epoch)]
                if ruling is Ruling.GRANTED:
                    orders += self.if_alive(
                        report.destination, verdict_for(report.destination, report.move_id, key, epoch, False)
                    )
                    orders += self._end(report, MoveOutcome.TAKEN_BACK)
                return orders
            case Claim.KEPT:
                return self._end(report, MoveOutcome.KEPT)
            case Claim.LOST:
                if owner == instance and epoch == report.epoch:
                    del self.members[instance].owned[key]
                    self.queue_again(key)
                return self._end(report, MoveOutcome.LOST)

    def _give(self, key: SampleKey, instance: str, epoch: int) -> None:
        """Make an instance the owner of an open sample."""
        sample = self.samples[key]
        if sample.owner is not None:
            self.members[sample.owner].owned.pop(key, None)
        sample.owner = instance
        sample.request = replace(sample.request, epoch=epoch)
        self.members[instance].owned[key] = sample

    def _end(self, report: MoveReport, outcome: MoveOutcome) -> list[Order]:
        order = self.moves.of(report.key)
        if order is None or order.move_id != report.move_id:
            return []
        return list(self.end_move(report.key, outcome, report.reason, report.metrics))

    def if_alive(self, instance: str, order: Order) -> list[Order]:
        """An order to an instance that serves; none for another."""
        return [order] if instance in self.members.serving else []


def _verdict_on(instance: str, report: MoveReport, ruling: Ruling, epoch: int) -> Order:
    return verdict_for(instance, report.move_id, report.key, epoch, ruling is not Ruling.DENIED)


def verdict_for(instance: str, move_id: str, key: SampleKey, epoch: int, owns: bool) -> Order:
    """The order that tells an instance whether a sample is its own."""
    verdict = Verdict.OWN if owns else Verdict.RELEASE
    return SendVerdict(
        instance=instance, verdict=Settle(move_id=move_id, key=key, verdict=verdict, epoch=epoch)
    )
