"""The rule of RLHFSpec (arXiv 2512.04752, section 5), as we read it.

The threshold is the number of samples at which profiled throughput saturates. Instances above it are sources, below
it destinations; the largest surplus is paired with the largest deficit, again and again; a cooldown follows. What is
ours: saturation is the knee of the rate curve, and of a source's samples those with the least context go first.
"""

from __future__ import annotations

import numpy as np

from .gate import Gate
from .pool_records import Move, PoolView
from .rate_curve import RateCurve
from .sample_arrays import FlatPool, flatten, key_of

COOLDOWN_S = 0.5
"An instance that took part in a move rests for so long."


class PaperRule:
    """Greedy pairing around a threshold."""

    def __init__(self, curve: RateCurve, gate: Gate, *, cooldown_s: float = COOLDOWN_S) -> None:
        self._curve = curve
        self._gate = gate
        self._cooldown_s = cooldown_s
        self._rests_until_s: dict[str, float] = {}
        self._thresholds: dict[int, int] = {}

    def threshold(self, num_slots: int) -> int:
        """Samples at which an instance with so many slots saturates."""
        if num_slots not in self._thresholds:
            self._thresholds[num_slots] = self._curve.knee(num_slots)
        return self._thresholds[num_slots]

    def plan(self, view: PoolView) -> tuple[Move, ...]:
        """Move each surplus to the largest deficits."""
        pool = flatten(view)
        limit = np.array([self.threshold(i.num_slots) for i in view.instances])
        surplus = pool.num_placed - limit
        resting = np.array([self._rests_until_s.get(name, -np.inf) > view.now_s for name in pool.names])
        # no more than it has, no more than fits
        supply = np.where(resting, 0, np.clip(surplus, 0, np.diff(pool.start)))
        demand = np.where(resting, 0, np.clip(-surplus, 0, pool.num_free))
        moves: list[Move] = []
        by_context = {}
        while supply.max(initial=0) > 0 and demand.max(initial=0) > 0:
            source, destination = int(supply.argmax()), int(demand.argmax())
            supply[source] -= 1
            demand[destination] -= 1
            line = by_context.setdefault(source, iter(_by_context(pool, source)))
            moves.append(self._move(view, pool, next(line), destination))
        for move in moves:
            for name in (move.source, move.destination):
                self._rests_until_s[name] = view.now_s + self._cooldown_s
        return tuple(moves)

    def note_finished(self, num_response_tokens: int) -> None:
        """The rule does not look at lengths."""

    def note_transfer(self, *, num_bytes: int, seconds: float, cold: bool) -> None:
        """The gate learns."""
        self._gate.note_transfer(num_bytes=num_bytes, seconds=seconds, cold=cold)

    def note_prefill(self, *, num_tokens: int, seconds: float) -> None:
        """The gate learns."""
        self._gate.note_prefill(num_tokens=num_tokens, seconds=seconds)

    def _move(self, view: PoolView, pool: FlatPool, sample: int, destination: int) -> Move:
        source = pool.names[int(pool.instance[sample])]
        target = pool.names[destination]
        cold = (source, target) not in view.warm_pairs
        return Move(
            key=key_of(view, pool, sample),
            source=source,
            destination=target,
            mode=self._gate.choose(int(pool.context_tokens[sample]), cold=cold),
            gain_s=0.0,
            reason=f"above and below {self.threshold(view.instances[destination].num_slots)} samples",
        )


def _by_context(pool: FlatPool, source: int) -> list[int]:
    first, last = int(pool.start[source]), int(pool.start[source + 1])
    return (first + np.argsort(pool.context_tokens[first:last], kind="stable")).tolist()
