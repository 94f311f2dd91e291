"""What both halves of a migrator work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...core.config import ReallocationConfig
from ...core.records import SampleKey
from ...engine.engine import Engine
from ...engine.exchange import CachePiece
from ...policies.migration.move_messages import Claim, MoveEvent, MoveOrder, MoveReport, PeerMessage
from .transfers import NoteEvent, Transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationContext:
    """One instance's engine, channels, peers and log."""

    instance: str
    engine_or_none: Callable[[], Engine | None]
    "None until its weights have come"
    transfers: Transfers
    settings: ReallocationConfig
    post: Callable[[str, PeerMessage, tuple[CachePiece, ...]], None]
    "sends a message to a peer, and pieces of caches beside it; must not wait"
    come_back: Callable[[MoveEvent], object]
    "puts events of the transfer threads into the mailbox"
    report: Callable[[MoveReport], None]
    "tells the scheduler, at least once and in order with completions"
    open_epochs: dict[SampleKey, int]
    "the loop's log of samples that are open here, kept up to date"
    note: NoteEvent
    "told of what the decode thread did for a move"
    clock: Callable[[], float]
    "seconds, for timeouts"
    wall_clock: Callable[[], float]
    "seconds that other instances' clocks agree with"

    def engine(self) -> Engine:
        """The engine, where there must be one."""
        engine = self.engine_or_none()
        assert engine is not None
        return engine


def report_of(
    order: MoveOrder, claim: Claim, reason: str, epoch: int, metrics: dict[str, float] | None = None
) -> MoveReport:
    """What an instance says of a move."""
    return MoveReport(
        claim=claim,
        move_id=order.move_id,
        key=order.key,
        epoch=epoch,
        source=order.source,
        destination=order.destination,
        reason=reason,
        metrics=dict(metrics) if metrics else None,
    )
