"""The source's half of a migrator: what `policies.migration.source` decides, on engine and channels."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from actors.migration.context import MigrationContext, report_of
from core.errors import WeightsError
from core.records import SampleKey
from core.sample_state import SampleState
from engine.cache.leases import Lease
from policies.migration.cache_frames import Frame, cut_into_frames
from policies.migration.move_messages import (
    CallOff,
    Cancel,
    Claim,
    HandOver,
    MoveOrder,
    Prepare,
    Ready,
    Shipped,
)
from policies.migration.source import (
    AskDestination,
    Forget,
    LetGo,
    SampleEnded,
    Say,
    Ship,
    SourceAction,
    SourceEvent,
    SourceMove,
    SourceStage,
    StopShipping,
    TakeUp,
)
from policies.reallocation.pool_records import MoveMode

ENDED_MOVES = 256
"So many ended moves are remembered, against messages that come late or twice."


@dataclass(slots=True)
class _Leaving:
    """One move."""

    machine: SourceMove
    cached_tokens: dict[str, int] = field(default_factory=dict)
    frames: tuple[Frame, ...] = ()
    lease: Lease | None = None
    shipped: bool = False
    "the transfer thread was told to ship"
    aside: SampleState | None = None


class MigrationSource:
    """Moves of which this instance is the source."""

    def __init__(self, context: MigrationContext) -> None:
        self._context = context
        self._leaving: dict[str, _Leaving] = {}
        self._ended: OrderedDict[str, tuple[str, tuple[Frame, ...]]] = OrderedDict()
        "moves that ended of late: the destination, and the frames it may still be waiting for"

    def __contains__(self, move_id: str) -> bool:
        return move_id in self._leaving

    def __len__(self) -> int:
        return len(self._leaving)

    @property
    def set_aside(self) -> Mapping[SampleKey, tuple[str, int]]:
        """Samples handed over and not settled: (move, epoch before it)."""
        return {
            leaving.machine.order.key: (move_id, leaving.machine.order.epoch)
            for move_id, leaving in self._leaving.items()
            if leaving.aside is not None
        }

    def handle(self, move_id: str, event: SourceEvent) -> None:
        """Pass an event to a move's machine and do what it says."""
        self._carry_out(move_id, self._leaving[move_id].machine.handle(event, now_s=self._context.clock()))

    def end_samples(self, keys: Iterable[SampleKey]) -> None:
        """These samples have finished here: they leave no more."""
        ended = set(keys)
        for move_id, leaving in list(self._leaving.items()):
            if leaving.machine.order.key in ended:
                self.handle(move_id, SampleEnded())

    def tick(self) -> None:
        """Give up what waits for too long."""
        for move_id, leaving in list(self._leaving.items()):
            self._carry_out(move_id, leaving.machine.tick(self._context.clock()))

    def call_off_what_has_not_left(self, reason: str) -> None:
        """Keep every sample that was not handed over yet."""
        for move_id, leaving in list(self._leaving.items()):
            if leaving.machine.stage is not SourceStage.HANDED_OVER:
                self.handle(move_id, CallOff(move_id=move_id, reason=reason))

    def begin(self, order: MoveOrder) -> None:
        """Carry out the scheduler's order, if the sample is still here."""
        if order.move_id in self._leaving or order.move_id in self._ended:
            return
        machine = SourceMove(order, now_s=self._context.clock(), timeout_s=self._context.settings.timeout_s)
        self._leaving[order.move_id] = _Leaving(machine)
        refusal = self._refusal(order)
        if refusal:
            self._say(self._leaving.pop(order.move_id), Claim.KEPT, refusal)
        else:
            self._carry_out(order.move_id, machine.begin())

    def answer_late(self, ready: Ready) -> None:
        """A destination waits for frames of a move that ended before any was shipped: none will come."""
        destination, frames = self._ended.pop(ready.move_id, ("", ()))
        if frames:
            self._ended[ready.move_id] = (destination, ())
            self._context.transfers.send_nothing(destination, ready.ticket, frames)

    def _refusal(self, order: MoveOrder) -> str:
        engine = self._context.engine_or_none()
        is_here = engine is not None and engine.exchange.holds(order.key)
        if not is_here or self._context.open_epochs.get(order.key) != order.epoch:
            return f"it does not run on {order.source} under epoch {order.epoch} any more"
        for move_id, other in self._leaving.items():
            if move_id != order.move_id and other.machine.order.key == order.key and other.aside is None:
                return f"it is already on its way from {order.source} to {other.machine.order.destination}"
        return ""

    def _carry_out(self, move_id: str, actions: list[SourceAction]) -> None:
        leaving = self._leaving[move_id]
        for action in actions:
            match action:
                case AskDestination():
                    self._ask_destination(leaving)
                case Ship():
                    self._ship(leaving, action.ticket)
                case LetGo():
                    self._let_go(leaving)
                case StopShipping():
                    self._stop_shipping(leaving, action)
                case TakeUp():
                    self._take_up(leaving, action.epoch)
                case Forget():
                    leaving.aside = None
                case Say():
                    self._say(leaving, action.claim, action.reason)
        if leaving.machine.stage is SourceStage.DONE:
            self._end_lease(leaving)
            self._leaving.pop(move_id, None)
            frames = () if leaving.shipped else leaving.frames
            self._ended[move_id] = (leaving.machine.order.destination, frames)
            if len(self._ended) > ENDED_MOVES:
                self._ended.popitem(last=False)

    def _ask_destination(self, leaving: _Leaving) -> None:
        order, engine = leaving.machine.order, self._context.engine()
        token_bytes = engine.exchange.token_bytes
        if order.mode is MoveMode.MIGRATE:
            leaving.cached_tokens = engine.exchange.cached_tokens(order.key) or {}
            leaving.frames = cut_into_frames(
                leaving.cached_tokens, token_bytes, frame_bytes=self._context.settings.frame_bytes
            )
            if leaving.frames:
                leaving.lease = engine.exchange.lease(order.key)
        prepare = Prepare(
            order=order,
            weight_version=engine.weight_version,
            drafter_version=engine.drafter_version,
            most_tokens=engine.exchange.most_tokens(order.key),
            cached_tokens=leaving.cached_tokens,
            token_bytes=token_bytes,
            frame_bytes=self._context.settings.frame_bytes,
            channel=self._context.transfers.open_channel(order.destination),
            broken_channel=self._context.transfers.broken_channel(order.destination),
        )
        self._context.post(order.destination, prepare, ())

    def _ship(self, leaving: _Leaving, ticket: Any) -> None:
        if leaving.lease is None:
            return
        move_id = leaving.machine.order.move_id
        leaving.shipped = True
        self._context.transfers.ship(
            leaving.machine.order.destination,
            ticket,
            move_id,
            leaving.frames,
            leaving.lease,
            lambda error: self._context.come_back(Shipped(move_id=move_id, error=error)),
        )

    def _let_go(self, leaving: _Leaving) -> None:
        order, engine = leaving.machine.order, self._context.engine()
        self._end_lease(leaving)
        shipped = leaving.cached_tokens if order.mode is MoveMode.MIGRATE else None
        drafter_version = engine.drafter_version
        left = engine.exchange.detach(order.key, weight_version=engine.weight_version, shipped=shipped)
        assert left is not None, "a sample that finishes ends its move"
        leaving.aside, tails = left
        self._context.open_epochs.pop(order.key, None)
        self._context.post(
            order.destination,
            HandOver(
                order=order,
                state=leaving.aside,
                drafter_version=drafter_version,
                left_at_s=self._context.wall_clock(),
                num_stage1_bytes=sum(frame.num_bytes for frame in leaving.frames),
            ),
            tuple(tails),
        )

    def _stop_shipping(self, leaving: _Leaving, action: StopShipping) -> None:
        self._end_lease(leaving)
        if action.tell_destination:
            order = leaving.machine.order
            self._context.post(order.destination, Cancel(move_id=order.move_id, reason=action.reason), ())

    def _take_up(self, leaving: _Leaving, epoch: int) -> None:
        state, leaving.aside = leaving.aside, None
        assert state is not None
        state = replace(state, request=replace(state.request, epoch=epoch))
        try:
            self._context.engine().resume(state)
        except WeightsError as error:
            order = replace(leaving.machine.order, epoch=epoch)
            self._context.report(report_of(order, Claim.LOST, str(error), epoch))
        else:
            self._context.open_epochs[state.request.key] = epoch

    def _end_lease(self, leaving: _Leaving) -> None:
        if leaving.lease is not None:
            self._context.engine().exchange.end_lease(leaving.lease)
            leaving.lease = None

    def _say(self, leaving: _Leaving, claim: Claim, reason: str) -> None:
        order = leaving.machine.order
        self._context.report(report_of(order, claim, reason, order.epoch))
