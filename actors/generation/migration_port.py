"""What the decode loop needs of migration: samples that leave and arrive between steps, and the time they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from core.records import Completion, SampleKey
from policies.migration.move_messages import News


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

    def take(self, news: News) -> None:
        """Take what reached the mailbox."""
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

    def take(self, news: News) -> None:
        """Take what reached the mailbox."""
        with self._timed():
            self._port.take(news)

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
