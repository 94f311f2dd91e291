"""Moves samples out of and into one instance, between its decode steps (design 3.4).

The decode thread alone calls this object: orders, messages of peers and news of the transfer threads come through
the loop's mailbox. What the machines of `policies.migration` decide is carried out on engine, channels, peers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actors.migration.context import Desk
from actors.migration.migration_destination import Arrivals
from actors.migration.migration_source import Departures
from core.records import Completion, SampleKey
from policies.migration.move_messages import HandOver, MoveOrder, News, Prepare, Ready, Settle


class Migrator:
    """One instance's moves, at most one a sample."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._departures = Departures(desk)
        self._arrivals = Arrivals(desk)

    @property
    def is_busy(self) -> bool:
        """True while a move is open here."""
        return bool(len(self._departures) or len(self._arrivals))

    @property
    def set_aside(self) -> Mapping[SampleKey, tuple[str, int]]:
        """Samples handed over and not settled: (move, epoch before it)."""
        return self._departures.set_aside

    def take(self, news: News) -> None:
        """Take an order, a message of a peer, news of a transfer thread, or a verdict."""
        match news:
            case MoveOrder():
                self._departures.begin(news)
            case Prepare():
                self._arrivals.begin(news)
            case HandOver():
                self._arrivals.take_hand_over(news)
            case _:
                self._pass_on(news)

    def before_step(self) -> None:
        """A decode step begins."""
        self._arrivals.before_step()

    def after_step(self, finished: Sequence[Completion]) -> None:
        """A decode step ended, and these samples with it."""
        self._departures.end_samples(completion.key for completion in finished)

    def tick(self) -> None:
        """Give up what waits for too long."""
        self._departures.tick()
        self._arrivals.tick()

    def hold(self) -> None:
        """A new scheduler takes over: what has not left yet, stays; what has not come yet, does not come.

        It counts what is held now, so no copy may come up later by an order of its predecessor.
        """
        self._departures.call_off_what_has_not_left("the scheduler was replaced")
        self._arrivals.refuse_what_has_not_come("the scheduler was replaced")

    def close(self) -> None:
        """End the transfer threads."""
        self._desk.transfers.close()

    def _pass_on(self, news: Any) -> None:
        if news.move_id in self._departures:
            self._departures.handle(news.move_id, news)
        elif news.move_id in self._arrivals:
            self._arrivals.handle(news.move_id, news)
        elif isinstance(news, Settle):
            self._arrivals.obey_late(news)
        elif isinstance(news, Ready):
            self._departures.answer_late(news)
