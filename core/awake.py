"""Time that leaves out when this process itself did not run: stopped, starved, or on a machine that was suspended.

Whoever was silent asks first whether it was itself that slept: after a pause of one's own every limit would seem to
be over, and whoever has answered meanwhile has not been heard yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def looking(look: Callable[[], None], every_s: float, *, name: str = "looking") -> Iterator[None]:
    """Call `look` every so many seconds, in a thread of this name, as long as the block runs."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(every_s):
            look()

    thread = threading.Thread(target=watch, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class AwakeClock:
    """Turns readings of a monotonic clock that is looked at often into time awake."""

    def __init__(self, *, longest_s: float) -> None:
        """`longest_s` is the most that counts between two readings: more than a waking reader needs between them."""
        self._longest_s = longest_s
        self._last_s: float | None = None
        self._slept_s = 0.0

    def read(self, now_s: float) -> float:
        """Return the seconds awake of a reading; they never fall, and begin with the first reading."""
        if self._last_s is None:
            self._last_s = now_s
        elif now_s > self._last_s:
            self._slept_s += max(0.0, now_s - self._last_s - self._longest_s)
            self._last_s = now_s
        return self._last_s - self._slept_s
