"""Moves samples out of and into one instance, between its decode steps (design 3.4).

The decode thread alone calls this object: orders, messages of peers and events of the transfer threads come through
the loop's mailbox. It asks the move's state machine (`policies.migration`) what to do, and the move does it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ...core.errors import WeightsError
from ...core.records import Completion, SampleKey
from ...engine.exchange import CachePiece
from ...policies.migration.cache_frames import Frame
from ...policies.migration.destination import DestinationStage
from ...policies.migration.move_messages import (
    CallOff,
    Claim,
    HandOver,
    MoveEvent,
    MoveOrder,
    Prepare,
    Ready,
    Refused,
    Settle,
    Verdict,
)
from ...policies.migration.source import SampleEnded, SourceStage
from .context import MigrationContext
from .migration_destination import MigrationDestination
from .migration_source import MigrationSource

Side = TypeVar("Side", MigrationSource, MigrationDestination)
ENDED_MOVES = 256
"So many ended moves are remembered, against messages that come late or twice."


class Migrator:
    """One instance's moves, at most one a sample."""

    def __init__(self, context: MigrationContext) -> None:
        self._context = context
        self._open: dict[str, MigrationSource | MigrationDestination] = {}
        self._ended: OrderedDict[str, tuple[str, tuple[Frame, ...]]] = OrderedDict()
        "moves from here that ended of late: the destination, and the frames it may still be waiting for"

    @property
    def is_busy(self) -> bool:
        """True while a move is open here."""
        return bool(self._open)

    @property
    def set_aside(self) -> Mapping[SampleKey, tuple[str, int]]:
        """Samples handed over and not settled: (move, epoch before it)."""
        return {
            move.machine.order.key: (move.machine.order.move_id, move.machine.order.epoch)
            for move in self._moves(MigrationSource)
            if move.aside is not None
        }

    def take(self, event: MoveEvent, pieces: tuple[CachePiece, ...] = ()) -> None:
        """Take an order, a message of a peer and the pieces beside it, an event of a transfer thread, or a verdict."""
        move, now_s = self._open.get(event.move_id), self._context.clock()
        actions: list[Any]
        match event:
            case MoveOrder() | Prepare() if move is not None or event.move_id in self._ended:
                return
            case MoveOrder():
                move = MigrationSource(self._context, event)
                if refusal := self._refusal(event):
                    move.say(Claim.KEPT, refusal)
                    return
                actions = move.machine.begin()
            case Prepare():
                move = MigrationDestination(self._context, event)
                actions = move.machine.begin(refusal=move.refusal())
            case HandOver() if isinstance(move, MigrationDestination):
                move.tails = pieces
                try:
                    self._context.engine().require_version(event.state)
                    actions = move.machine.handle(event, now_s=now_s)
                except WeightsError as error:
                    actions = move.machine.refuse(str(error), now_s=now_s)
            case _:
                if move is None:
                    self._answer_late(event)
                    return
                actions = move.machine.handle(event, now_s=now_s)
        self._open[event.move_id] = move
        move.carry_out(actions)
        self._forget_if_over(move)

    def before_step(self) -> None:
        """A decode step begins: what came in since the last one is running now."""
        for move in self._moves(MigrationDestination):
            move.before_step()

    def after_step(self, finished: Sequence[Completion]) -> None:
        """A decode step ended, and these samples with it: they leave no more."""
        ended = {completion.key for completion in finished}
        for move in self._moves(MigrationSource):
            if move.machine.order.key in ended:
                move.carry_out(move.machine.handle(SampleEnded(), now_s=self._context.clock()))
                self._forget_if_over(move)

    def tick(self) -> None:
        """Give up what waits for too long."""
        for leaving in self._moves(MigrationSource):
            leaving.carry_out(leaving.machine.tick(self._context.clock()))
            self._forget_if_over(leaving)
        for coming in self._moves(MigrationDestination):
            coming.carry_out(coming.machine.tick(self._context.clock()))
            self._forget_if_over(coming)

    def hold(self) -> None:
        """A new scheduler takes over: what has not left yet, stays; what has not come yet, does not come.

        It counts what is held now, so no copy may come up later by an order of its predecessor.
        """
        reason, now_s = "the scheduler was replaced", self._context.clock()
        for leaving in self._moves(MigrationSource):
            if leaving.machine.stage is not SourceStage.HANDED_OVER:
                call_off = CallOff(move_id=leaving.machine.order.move_id, reason=reason)
                leaving.carry_out(leaving.machine.handle(call_off, now_s=now_s))
                self._forget_if_over(leaving)
        for coming in self._moves(MigrationDestination):
            if coming.machine.stage is not DestinationStage.RUNNING:
                coming.carry_out(coming.machine.refuse(reason, now_s=now_s))
                self._forget_if_over(coming)

    def _moves(self, side: type[Side]) -> list[Side]:
        return [move for move in self._open.values() if isinstance(move, side)]

    def _refusal(self, order: MoveOrder) -> str:
        """Why a sample cannot leave, "" when it can."""
        engine = self._context.engine_or_none()
        is_here = engine is not None and engine.exchange.holds(order.key)
        if not is_here or self._context.open_epochs.get(order.key) != order.epoch:
            return f"it does not run on {order.source} under epoch {order.epoch} any more"
        for other in self._moves(MigrationSource):
            if other.machine.order.key == order.key and other.aside is None:
                return f"it is already on its way from {order.source} to {other.machine.order.destination}"
        return ""

    def _answer_late(self, event: MoveEvent) -> None:
        """What comes for a move that is over here, or was never heard of."""
        match event:
            case HandOver():
                # the source asks for the sample back then
                reason = f"{self._context.instance} does not expect it, or no more"
                self._context.post(event.order.source, Refused(move_id=event.move_id, reason=reason), ())
            case Settle(verdict=Verdict.RELEASE):
                # a copy that is another's must not go on
                if self._context.open_epochs.get(event.key, event.epoch) < event.epoch:
                    self._context.engine().exchange.drop(event.key)
                    self._context.open_epochs.pop(event.key, None)
            case Ready():
                # a destination waits for frames of a move that ended before any was shipped: none will come
                destination, frames = self._ended.get(event.move_id, ("", ()))
                if frames:
                    self._ended[event.move_id] = (destination, ())
                    self._context.transfers.send_nothing(destination, event.ticket, frames)

    def _forget_if_over(self, move: MigrationSource | MigrationDestination) -> None:
        if not move.machine.is_done:
            return
        order = move.machine.order
        del self._open[order.move_id]
        if isinstance(move, MigrationSource):
            self._ended[order.move_id] = (order.destination, move.unshipped)
            if len(self._ended) > ENDED_MOVES:
                self._ended.popitem(last=False)
