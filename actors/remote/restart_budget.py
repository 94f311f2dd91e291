"""How often what is lost is replaced: a bound on losses that come again and again, not on those of a long run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 3600.0
"A loss counts for so long."


class RestartBudget:
    """So many restarts within any `WINDOW_S`."""

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is monotonic, in seconds."""
        self.most = most
        self._clock = clock
        self._spent_s: deque[float] = deque()

    @property
    def num_spent(self) -> int:
        """Restarts that count now."""
        now_s = self._clock()
        while self._spent_s and now_s - self._spent_s[0] >= WINDOW_S:
            self._spent_s.popleft()
        return len(self._spent_s)

    def spend(self) -> bool:
        """Count one restart; False, and nothing counted, where all are used up."""
        if self.num_spent >= self.most:
            return False
        self._spent_s.append(self._clock())
        return True
