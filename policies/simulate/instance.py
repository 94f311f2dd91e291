"""One simulated instance: all its samples get tokens at one speed, which its number of samples sets."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class SimulatedInstance:
    """Progress is counted in tokens of a mean sample since the start; time only moves forward."""

    def __init__(self, seconds_per_token: Sequence[float], bystander_share: float) -> None:
        """`seconds_per_token[B]`, B up to the number of slots."""
        self._seconds_per_token = seconds_per_token
        self._bystander_share = bystander_share
        self.now_s = 0.0
        self.progress = 0.0
        self.busy_s = 0.0
        self.speedup = 1.0
        "over the curve"
        self.blocked_until_s = 0.0
        "a prefill holds the decode steps up"
        self.num_transfers = 0
        self.running: dict[int, float] = {}
        "sample -> progress at which it is done"
        self._ends: list[tuple[float, int]] = []

    @property
    def _pace(self) -> float:
        slower = 1.0 + (self._bystander_share if self.num_transfers else 0.0)
        return self._seconds_per_token[len(self.running)] * slower / self.speedup

    def advance(self, now_s: float) -> None:
        """Let time pass; no sample may end before `now_s`."""
        held_s = min(max(self.blocked_until_s - self.now_s, 0.0), now_s - self.now_s)
        self.busy_s += held_s
        if self.running:
            decoding_s = now_s - self.now_s - held_s
            self.busy_s += decoding_s
            self.progress += decoding_s / self._pace
        self.now_s = now_s

    def block(self, seconds: float) -> float:
        """Hold decode steps up for so long; return until when."""
        self.blocked_until_s = max(self.blocked_until_s, self.now_s) + seconds
        return self.blocked_until_s

    def add(self, sample: int, tokens_to_go: float) -> None:
        """Take a sample that needs so many tokens of a mean sample; the instance is up to date."""
        end = self.progress + tokens_to_go
        self.running[sample] = end
        heapq.heappush(self._ends, (end, sample))

    def remove(self, sample: int) -> float:
        """Give a sample up; returns what it still needs."""
        return self.running.pop(sample) - self.progress

    def next_end(self) -> tuple[float, int] | None:
        """When the next sample will be done if nothing changes, and which."""
        while self._ends and self.running.get(self._ends[0][1]) != self._ends[0][0]:
            heapq.heappop(self._ends)
        if not self._ends:
            return None
        end, sample = self._ends[0]
        start_s = max(self.now_s, self.blocked_until_s)
        return start_s + max(end - self.progress, 0.0) * self._pace, sample
