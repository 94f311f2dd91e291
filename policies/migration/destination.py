"""The destination's side of one move.

    RESERVED --frames--> LANDED --HandOver--> RUNNING --Settle(own)--> DONE
        |                   |                    |
        +-- failed, cancelled, timed out:        +-- Settle(release): drop the sample
            free the slot                            no verdict in time: COMMIT again

It may decode before the verdict: a report under an epoch that lost is compared and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..reallocation.pool_records import MoveMode
from .move_messages import (
    Cancel,
    Claim,
    HandOver,
    Landed,
    MoveEvent,
    PeerMessage,
    Prepare,
    Received,
    Refused,
    Settle,
    Verdict,
)
from .source import Say


class DestinationStage(Enum):
    """Where a move stands at its destination."""

    RESERVED = "reserved"
    LANDED = "landed"
    RUNNING = "running"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSlot:
    """Reserve a slot; expect frames when there are any."""

    expect_frames: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSlot:
    """Give the reserved slot back, forget what has landed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Send a message to the source."""

    message: PeerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeIn:
    """Put the sample into the running batch, in the reserved slot, under the next epoch."""

    message: HandOver


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Take the sample out again: another owns it."""


DestinationAction = KeepSlot | FreeSlot | Answer | TakeIn | Drop | Say


class DestinationMove:
    """One move at its destination."""

    def __init__(self, prepare: Prepare, *, now_s: float, timeout_s: float) -> None:
        self.prepare = prepare
        self.order = prepare.order
        self.stage = DestinationStage.RESERVED
        self._timeout_s = timeout_s
        self._since_s = now_s

    @property
    def is_done(self) -> bool:
        """True when nothing is left to do here."""
        return self.stage is DestinationStage.DONE

    def begin(self, *, refusal: str) -> list[DestinationAction]:
        """The first actions; `refusal` says why the sample cannot come, empty when it can."""
        if refusal:
            self.stage = DestinationStage.DONE
            return [Answer(message=Refused(move_id=self.order.move_id, reason=refusal))]
        ships = self.order.mode is MoveMode.MIGRATE
        if not ships:
            self.stage = DestinationStage.LANDED
        return [KeepSlot(expect_frames=ships)]

    def handle(self, event: MoveEvent, *, now_s: float) -> list[DestinationAction]:
        """Take one event. What comes too late or twice, or is no destination's business, gives no action."""
        match event:
            case Received() if self.stage is DestinationStage.RESERVED:
                if event.error:
                    return self._leave(now_s, event.error)
                landed = Landed(move_id=self.order.move_id)
                return self._enter(DestinationStage.LANDED, now_s, Answer(message=landed))
            case HandOver() if self.stage is DestinationStage.LANDED:
                return self._enter(
                    DestinationStage.RUNNING,
                    now_s,
                    TakeIn(message=event),
                    Say(claim=Claim.COMMIT, reason="it runs here"),
                )
            case Cancel() if self.stage in (DestinationStage.RESERVED, DestinationStage.LANDED):
                return self._enter(DestinationStage.DONE, now_s, FreeSlot())
            case Settle() if self.stage in (DestinationStage.RESERVED, DestinationStage.LANDED):
                if event.verdict is Verdict.OWN:
                    return []
                return self._enter(DestinationStage.DONE, now_s, FreeSlot())
            case Settle() if self.stage is DestinationStage.RUNNING:
                drops = [Drop()] if event.verdict is Verdict.RELEASE else []
                return self._enter(DestinationStage.DONE, now_s, *drops)
            case _:
                return []

    def tick(self, now_s: float) -> list[DestinationAction]:
        """Give up what waits for too long."""
        waited_s = now_s - self._since_s
        if self.stage is DestinationStage.DONE or waited_s <= self._timeout_s:
            return []
        if self.stage is DestinationStage.RUNNING:
            self._since_s = now_s
            reason = f"no verdict of the scheduler for {waited_s:.1f} s"
            return [Say(claim=Claim.COMMIT, reason=reason)]
        waited_for = "the caches" if self.stage is DestinationStage.RESERVED else "the hand-over"
        return self._leave(
            now_s,
            f"{self.order.destination} waited {waited_s:.1f} s for {waited_for} from {self.order.source}",
        )

    def refuse(self, reason: str, *, now_s: float) -> list[DestinationAction]:
        """The sample cannot be taken in after all."""
        return self._leave(now_s, reason)

    def _leave(self, now_s: float, reason: str) -> list[DestinationAction]:
        refused = Refused(move_id=self.order.move_id, reason=reason)
        return self._enter(DestinationStage.DONE, now_s, FreeSlot(), Answer(message=refused))

    def _enter(self, stage: DestinationStage, now_s: float, *actions: DestinationAction) -> list:
        self.stage, self._since_s = stage, now_s
        return list(actions)
