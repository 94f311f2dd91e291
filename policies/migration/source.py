"""The source's side of one move.

    PREPARING --Ready--> SHIPPING --Landed--> HANDED_OVER --Settle(release)--> DONE
        |                    |                     |
        +-- refused, failed, cancelled, ended,     +-- no verdict in time, refused, called off:
            timed out: the sample never left           TAKE_BACK, again until a verdict comes
                                                       Settle(own): go on under the new epoch

Until HANDED_OVER the source decodes and nothing can be lost; from there on it keeps the sample's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..reallocation.pool_records import MoveMode
from .move_messages import (
    CallOff,
    Claim,
    Landed,
    MoveEvent,
    MoveOrder,
    Ready,
    Refused,
    Settle,
    Shipped,
    Verdict,
)


class SourceStage(Enum):
    """Where a move stands at its source."""

    PREPARING = "preparing"
    SHIPPING = "shipping"
    HANDED_OVER = "handed over"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskDestination:
    """Lease the sample's caches and send Prepare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ship:
    """Ship the leased caches on the transfer thread."""

    ticket: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LetGo:
    """Detach the sample, keep its state aside, send HandOver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopShipping:
    """End the lease; tell the destination when it knows of the move."""

    notify_destination: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeUp:
    """Go on with the sample that was put aside, under this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Drop what was put aside: another owns the sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """Report to the scheduler."""

    claim: Claim
    reason: str


SourceAction = AskDestination | Ship | LetGo | StopShipping | TakeUp | Forget | Say


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEnded:
    """The sample finished here before it was handed over."""


class SourceMove:
    """One move at its source."""

    def __init__(self, order: MoveOrder, *, now_s: float, timeout_s: float) -> None:
        self.order = order
        self.stage = SourceStage.PREPARING
        self._timeout_s = timeout_s
        self._since_s = now_s

    @property
    def is_done(self) -> bool:
        """True when nothing is left to do here."""
        return self.stage is SourceStage.DONE

    def begin(self) -> list[SourceAction]:
        """The first actions."""
        return [AskDestination()]

    def handle(self, event: MoveEvent | SampleEnded, *, now_s: float) -> list[SourceAction]:
        """Take one event. What comes too late or twice, or is no source's business, gives no action."""
        match event:
            case Ready() if self.stage is SourceStage.PREPARING:
                if self.order.mode is MoveMode.RECOMPUTE:
                    return self._enter(SourceStage.HANDED_OVER, now_s, LetGo())
                return self._enter(SourceStage.SHIPPING, now_s, Ship(ticket=event.ticket))
            case Landed() if self.stage is SourceStage.SHIPPING:
                return self._enter(SourceStage.HANDED_OVER, now_s, LetGo())
            case Shipped() if event.error and self.stage is SourceStage.SHIPPING:
                return self._keep(now_s, event.error, notify=True)
            case Refused():
                return self._give_up(now_s, f"{self.order.destination} refused: {event.reason}", notify=False)
            case CallOff():
                return self._give_up(now_s, event.reason, notify=True)
            case SampleEnded() if self.stage in (SourceStage.PREPARING, SourceStage.SHIPPING):
                return self._keep(now_s, "finished before it left", notify=True)
            case Settle() if self.stage is SourceStage.HANDED_OVER:
                action = TakeUp(epoch=event.epoch) if event.verdict is Verdict.OWN else Forget()
                return self._enter(SourceStage.DONE, now_s, action)
            case _:
                return []

    def tick(self, now_s: float) -> list[SourceAction]:
        """Give up what waits for too long, naming whom it waited for."""
        waited_s = now_s - self._since_s
        if self.stage is SourceStage.DONE or waited_s <= self._timeout_s:
            return []
        waited_for = {
            SourceStage.PREPARING: f"{self.order.destination} to keep a slot",
            SourceStage.SHIPPING: f"{self.order.destination} to receive the caches",
            SourceStage.HANDED_OVER: f"the scheduler's verdict on what {self.order.destination} got",
        }[self.stage]
        return self._give_up(
            now_s, f"{self.order.source} waited {waited_s:.1f} s for {waited_for}", notify=True
        )

    def _give_up(self, now_s: float, reason: str, *, notify: bool) -> list[SourceAction]:
        if self.stage is SourceStage.HANDED_OVER:
            self._since_s = now_s
            return [Say(claim=Claim.TAKE_BACK, reason=reason)]
        if self.stage is SourceStage.DONE:
            return []
        return self._keep(now_s, reason, notify=notify)

    def _keep(self, now_s: float, reason: str, *, notify: bool) -> list[SourceAction]:
        stop = StopShipping(notify_destination=notify, reason=reason)
        return self._enter(SourceStage.DONE, now_s, stop, Say(claim=Claim.KEPT, reason=reason))

    def _enter(self, stage: SourceStage, now_s: float, *actions: SourceAction) -> list[SourceAction]:
        self.stage, self._since_s = stage, now_s
        return list(actions)
