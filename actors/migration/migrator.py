"""Moves samples out of and into one instance, between its decode steps (design 3.4).

The decode thread alone calls this object: orders, messages of peers and news of the transfer threads come through
the loop's mailbox. What the machines of `policies.migration` decide is carried out on engine, channels, peers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actors.migration.context import MigrationContext
from actors.migration.migration_destination import MigrationDestination
from actors.migration.migration_source import MigrationSource
from core.records import Completion, SampleKey
from engine.exchange import CachePiece
from policies.migration.move_messages import HandOver, MoveOrder, News, Prepare, Ready, Settle


class Migrator:
    """One instance's moves, at most one a sample."""

    def __init__(self, context: MigrationContext) -> None:
        self._context = context
        self._outgoing = MigrationSource(context)
        self._incoming = MigrationDestination(context)

    @property
    def is_busy(self) -> bool:
        """True while a move is open here."""
        return bool(len(self._outgoing) or len(self._incoming))

    @property
    def set_aside(self) -> Mapping[SampleKey, tuple[str, int]]:
        """Samples handed over and not settled: (move, epoch before it)."""
        return self._outgoing.set_aside

    def take(self, news: News, pieces: tuple[CachePiece, ...] = ()) -> None:
        """Take an order, a message of a peer, news of a transfer thread, or a verdict."""
        match news:
            case MoveOrder():
                self._outgoing.begin(news)
            case Prepare():
                self._incoming.begin(news)
            case HandOver():
                self._incoming.take_hand_over(news, pieces)
            case _:
                self._pass_on(news)

    def before_step(self) -> None:
        """A decode step begins."""
        self._incoming.before_step()

    def after_step(self, finished: Sequence[Completion]) -> None:
        """A decode step ended, and these samples with it."""
        self._outgoing.end_samples(completion.key for completion in finished)

    def tick(self) -> None:
        """Give up what waits for too long."""
        self._outgoing.tick()
        self._incoming.tick()

    def hold(self) -> None:
        """A new scheduler takes over: what has not left yet, stays; what has not come yet, does not come.

        It counts what is held now, so no copy may come up later by an order of its predecessor.
        """
        self._outgoing.call_off_what_has_not_left("the scheduler was replaced")
        self._incoming.refuse_what_has_not_come("the scheduler was replaced")

    def close(self) -> None:
        """End the transfer threads."""
        self._context.transfers.close()

    def _pass_on(self, news: Any) -> None:
        if news.move_id in self._outgoing:
            self._outgoing.handle(news.move_id, news)
        elif news.move_id in self._incoming:
            self._incoming.handle(news.move_id, news)
        elif isinstance(news, Settle):
            self._incoming.obey_late(news)
        elif isinstance(news, Ready):
            self._outgoing.answer_late(news)
