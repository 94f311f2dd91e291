"""What the decode loop needs of migration: samples that leave and arrive between steps, and the time they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from core.records import Completion, SampleKey
from policies.migration.move_messages import News

if TYPE_CHECKING:
    from engine.exchange import CachePiece


class MigrationPort(Protocol):
    """Through which samples move to and from other instances: `actors.migration.migrator.Migrator`."""

    @property
    def is_busy(self) -> bool:
        """True while a move is open here."""
        ...

    @property
    def set_aside(self) -> Mapping[SampleKey, tuple[str, int]]:
        """Samples handed over and not settled: (move, epoch before it)."""
        ...

    def take(self, news: News, pieces: tuple[CachePiece, ...] = ()) -> None:
        """Take what reached the mailbox, and the pieces of caches that came beside it."""
        ...

    def before_step(self) -> None:
        """A decode step begins."""
        ...

    def after_step(self, finished: Sequence[Completion]) -> None:
        """A decode step ended, and these samples with it."""
        ...

    def tick(self) -> None:
        """Time has passed."""
        ...

    def hold(self) -> None:
        """A new scheduler takes over."""
        ...


class TimedPort:
    """A port that counts the seconds the decode thread spends on moves, prefilling again included."""

    def __init__(self, port: MigrationPort, clock: Callable[[], float] = time.monotonic) -> None:
        self._port = port
        self._clock = clock
        self.seconds = 0.0

    @property
    def is_busy(self) -> bool:
        """True while a move is open here."""
        return self._port.is_busy

    @property
    def set_aside(self) -> Mapping[SampleKey, tuple[str, int]]:
        """Samples handed over and not settled: (move, epoch before it)."""
        return self._port.set_aside

    def take(self, news: News, pieces: tuple[CachePiece, ...] = ()) -> None:
        """Take what reached the mailbox, and the pieces of caches that came beside it."""
        with self._timed():
            self._port.take(news, pieces)

    def before_step(self) -> None:
        """A decode step begins."""
        with self._timed():
            self._port.before_step()

    def after_step(self, finished: Sequence[Completion]) -> None:
        """A decode step ended, and these samples with it."""
        with self._timed():
            self._port.after_step(finished)

    def tick(self) -> None:
        """Time has passed."""
        with self._timed():
            self._port.tick()

    def hold(self) -> None:
        """A new scheduler takes over."""
        with self._timed():
            self._port.hold()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began_s = self._clock()
        try:
            yield
        finally:
            self.seconds += self._clock() - began_s
