"""A budget of seconds: says whether a piece of work still fits, by what such work has cost before."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_REMEMBERED = 8
_RELIEF = 0.9
"A refusal makes what is remembered so much cheaper: one slow moment must not refuse work for good."


class WorkCosts:
    """Seconds a unit of each kind of work, remembered over a run; the dearest of the last few counts."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._s_per_unit: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    @contextmanager
    def timed(self, kind: str, num_units: int) -> Iterator[None]:
        """Remember what the block costs."""
        began_s = self.clock()
        yield
        self._s_per_unit[kind].append((self.clock() - began_s) / max(num_units, 1))

    def expected_s(self, kind: str, num_units: int) -> float | None:
        """Seconds that so many units will take; None when none has been done yet."""
        seen = self._s_per_unit.get(kind)
        return max(seen) * num_units if seen else None

    def relieve(self) -> None:
        """Lower every estimate a little, because work was refused by them."""
        for seen in self._s_per_unit.values():
            for i, value in enumerate(seen):
                seen[i] = value * _RELIEF


class TimeBudget:
    """Seconds that end at a fixed time."""

    def __init__(self, budget_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = clock()
        self._end_s = self._began_s + budget_s

    @property
    def spent_s(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began_s

    def admits(self, seconds: float) -> bool:
        """True when work of so many seconds ends in time."""
        return self._clock() + seconds <= self._end_s
