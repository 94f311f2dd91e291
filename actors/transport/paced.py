"""A sender that leaves the processor to others: transfers must not slow the samples that stay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from .channels import Sender


class Paced:
    """Wraps a sender; its thread computes for at most `share` of the wall time. 1.0 never sleeps.

    Waiting for the peer is rest as well. Work around the sends counts when done under `busy()`:

        with paced.busy():
            pack(frame)
        paced.send(frame)       # and then sleeps for both
    """

    def __init__(
        self,
        sender: Sender,
        *,
        share: float,
        busy_clock: Callable[[], float] = time.thread_time,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`busy_clock` counts the calling thread's seconds on a processor, `clock` all."""
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share must be above 0 and at most 1, got {share}")
        self._sender = sender
        self._idle_per_busy = 1.0 / share - 1.0
        self._busy_clock = busy_clock
        self._clock = clock
        self._sleep = sleep
        self._busy_s = 0.0
        self._waited_s = 0.0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count what the body computes as busy time."""
        began_s, began_busy_s = self._clock(), self._busy_clock()
        try:
            yield
        finally:
            busy_s = self._busy_clock() - began_busy_s
            self._busy_s += busy_s
            self._waited_s += self._clock() - began_s - busy_s

    def send(self, frame: np.ndarray) -> None:
        """Send one frame, then sleep in proportion to the busy time since the last sleep."""
        with self.busy():
            self._sender.send(frame)
        idle_s = self._busy_s * self._idle_per_busy - self._waited_s
        self._busy_s = self._waited_s = 0.0
        if idle_s > 0.0:
            self._sleep(idle_s)

    def close(self) -> None:
        """Close the sender."""
        self._sender.close()
