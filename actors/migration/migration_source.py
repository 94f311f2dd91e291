"""One move at its source: what `policies.migration.source` decides, on engine and channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...core.errors import WeightsError
from ...core.sample_state import SampleState
from ...engine.cache.leases import Lease
from ...policies.migration.cache_frames import Frame, cut_into_frames
from ...policies.migration.move_messages import Cancel, Claim, HandOver, MoveOrder, Prepare, Shipped
from ...policies.migration.source import (
    AskDestination,
    Forget,
    LetGo,
    Say,
    Ship,
    SourceAction,
    SourceMove,
    StopShipping,
    TakeUp,
)
from ...policies.reallocation.pool_records import MoveMode
from .context import MigrationContext, report_of


class MigrationSource:
    """What this instance has leased, shipped and set aside for one move away from it."""

    def __init__(self, context: MigrationContext, order: MoveOrder) -> None:
        self.machine = SourceMove(order, now_s=context.clock(), timeout_s=context.settings.timeout_s)
        self.aside: SampleState | None = None
        self._context = context
        self._cached_tokens: dict[str, int] = {}
        self._frames: tuple[Frame, ...] = ()
        self._lease: Lease | None = None
        self._shipped = False
        "the transfer thread was told to ship"

    @property
    def unshipped(self) -> tuple[Frame, ...]:
        """Frames that the destination may be waiting for though none was sent."""
        return () if self._shipped else self._frames

    def carry_out(self, actions: list[SourceAction]) -> None:
        """Do what the state machine says."""
        for action in actions:
            match action:
                case AskDestination():
                    self._ask_destination()
                case Ship():
                    self._ship(action.ticket)
                case LetGo():
                    self._let_go()
                case StopShipping():
                    self._stop_shipping(action)
                case TakeUp():
                    self._take_up(action.epoch)
                case Forget():
                    self.aside = None
                case Say():
                    self.say(action.claim, action.reason)
        if self.machine.is_done:
            self._end_lease()

    def say(self, claim: Claim, reason: str) -> None:
        """Report to the scheduler."""
        order = self.machine.order
        self._context.report(report_of(order, claim, reason, order.epoch))

    def _ask_destination(self) -> None:
        order, engine = self.machine.order, self._context.engine()
        token_bytes = engine.exchange.token_bytes
        if order.mode is MoveMode.MIGRATE:
            self._cached_tokens = engine.exchange.cached_tokens(order.key) or {}
            self._frames = cut_into_frames(
                self._cached_tokens, token_bytes, frame_bytes=self._context.settings.frame_bytes
            )
            if self._frames:
                self._lease = engine.exchange.lease(order.key)
        prepare = Prepare(
            order=order,
            weight_version=engine.weight_version,
            drafter_version=engine.drafter_version,
            most_tokens=engine.exchange.most_tokens(order.key),
            cached_tokens=self._cached_tokens,
            token_bytes=token_bytes,
            frame_bytes=self._context.settings.frame_bytes,
            channel=self._context.transfers.open_channel(order.destination),
            broken_channel=self._context.transfers.broken_channel(order.destination),
        )
        self._context.post(order.destination, prepare, ())

    def _ship(self, ticket: Any) -> None:
        if self._lease is None:
            return
        move_id = self.machine.order.move_id
        self._shipped = True
        self._context.transfers.ship(
            self.machine.order.destination,
            ticket,
            move_id,
            self._frames,
            self._lease,
            lambda error: self._context.come_back(Shipped(move_id=move_id, error=error)),
        )

    def _let_go(self) -> None:
        order, engine = self.machine.order, self._context.engine()
        self._end_lease()
        shipped = self._cached_tokens if order.mode is MoveMode.MIGRATE else None
        drafter_version = engine.drafter_version
        left = engine.exchange.detach(order.key, weight_version=engine.weight_version, shipped=shipped)
        assert left is not None, "a sample that finishes ends its move"
        self.aside, tails = left
        self._context.open_epochs.pop(order.key, None)
        self._context.post(
            order.destination,
            HandOver(
                order=order,
                state=self.aside,
                drafter_version=drafter_version,
                left_at_s=self._context.wall_clock(),
                num_stage1_bytes=sum(frame.num_bytes for frame in self._frames),
            ),
            tuple(tails),
        )

    def _stop_shipping(self, action: StopShipping) -> None:
        self._end_lease()
        if action.notify_destination:
            order = self.machine.order
            self._context.post(order.destination, Cancel(move_id=order.move_id, reason=action.reason), ())

    def _take_up(self, epoch: int) -> None:
        state, self.aside = self.aside, None
        assert state is not None
        state = replace(state, request=replace(state.request, epoch=epoch))
        try:
            self._context.engine().resume(state)
        except WeightsError as error:
            order = replace(self.machine.order, epoch=epoch)
            self._context.report(report_of(order, Claim.LOST, str(error), epoch))
        else:
            self._context.open_epochs[state.request.key] = epoch

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._context.engine().exchange.end_lease(self._lease)
            self._lease = None
