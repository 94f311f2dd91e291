"""How long the phases of a decode step take, without waiting for the device between them."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Phases:
    """Marks between phases: the clock on a CPU, events of the stream on a GPU, where the host runs ahead."""

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        self._clock = clock
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self, *, is_last: bool = False) -> None:
        """End a phase and begin the next; the last one ends with what was called before."""
        self._is_over = is_last
        self._times.append(self._clock())
        if self._stream is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._stream)
            self._events.append(event)

    def finish(self, since_s: float = 0.0) -> list[float]:
        """Wait for the device, once; return the seconds of each phase. The last one takes what is left of the whole.

        The host's count from `since_s` on.
        """
        if self._stream is not None:
            (self._events[-1] if self._is_over else self._stream).synchronize()
        self._times = [max(at, since_s) for at in (*self._times, self._clock())]
        seconds = [after - before for before, after in zip(self._times, self._times[1:], strict=False)]
        if self._stream is None:
            return seconds
        on_device = [
            first.elapsed_time(second) / 1e3
            for first, second in zip(self._events, self._events[1:], strict=False)
        ]
        return [*on_device, max(sum(seconds) - sum(on_device), 0.0)]
