"""The door of an instance, through which samples come and go, and the clock at the door."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from core.records import Completion, SampleKey
from policies.migration.move_messages import News


class Door(Protocol):
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


class TimedDoor:
    """A door that knows how long the decode thread was kept at it, caches computed anew included."""

    def __init__(self, door: Door, clock: Callable[[], float] = time.monotonic) -> None:
        self._door = door
        self._clock = clock
        self.seconds = 0.0

    @property
    def is_busy(self) -> bool:
        """True while a move is open here."""
        return self._door.is_busy

    @property
    def set_aside(self) -> Mapping[SampleKey, tuple[str, int]]:
        """Samples handed over and not settled: (move, epoch before it)."""
        return self._door.set_aside

    def take(self, news: News) -> None:
        """Take what reached the mailbox."""
        with self._timed():
            self._door.take(news)

    def before_step(self) -> None:
        """A decode step begins."""
        with self._timed():
            self._door.before_step()

    def after_step(self, finished: Sequence[Completion]) -> None:
        """A decode step ended, and these samples with it."""
        with self._timed():
            self._door.after_step(finished)

    def tick(self) -> None:
        """Time has passed."""
        with self._timed():
            self._door.tick()

    def hold(self) -> None:
        """A new scheduler takes over."""
        with self._timed():
            self._door.hold()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began_s = self._clock()
        try:
            yield
        finally:
            self.seconds += self._clock() - began_s
