"""The search for moves that pay: pairs of instances, the best sample of each pair, again and again.

The instance that will be done last is paired with the one that will be done first, the second last with the second
first, and so on. For each pair the question is which sample, moved, makes the later of the two done soonest. What a
move gains is what it takes off the later one; in large pools any of the late ones may turn out to be the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from policies.reallocation.finish_time import Load, Outlook
from policies.reallocation.gate import MoveCost
from policies.reallocation.pool import FlatPool
from policies.reallocation.rate_curve import RateCurve
from policies.reallocation.records import MoveMode

MAX_ROUNDS = 16
"Moves planned at once for one pair; in large pools fewer."
MAX_PAIRS = 256
"Pairs of a round: those furthest apart."
ROUND_PAIRS = 512
"Pairs of all rounds together."
ROUND_CANDIDATES = 1024
"Candidate moves of a round over all its pairs; at least MIN_CANDIDATES for each."
MIN_CANDIDATES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Hurdle:
    """What a move must gain."""

    cost_margin: float = 2.0
    "so many times what it costs, and .."
    gain_share: float = 0.01
    ".. this share of the later instance's remaining time: predictions wobble by as much"
    least_s: float = 0.0
    ".. and so many seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundMove:
    """A move that pays; instances and sample by their numbers in the pool."""

    sample: int
    source: int
    destination: int
    mode: MoveMode
    gain_s: float
    later_s: float
    "when the source would have been done"
    earlier_s: float
    "when the destination would have been done"


def search_moves(
    pool: FlatPool,
    expected: Outlook,
    load: Load,
    curve: RateCurve,
    *,
    cost: Callable[[np.ndarray, np.ndarray, np.ndarray], MoveCost],
    may_move: Callable[[int, int, int], bool],
    hurdle: Hurdle,
) -> list[FoundMove]:
    """Return moves in the order in which they were found: no sample twice, no slot twice.

    Args:
        pool: who is where, and what is free.
        expected: by length.
        load: [K] instances as they are.
        curve: of every instance.
        cost: of samples [P, C] from sources [P] to destinations [P].
        may_move: whether (sample, source, destination) is not resting.
        hurdle: what a move must gain.
    """
    return _Search(pool, expected, load, curve, cost, may_move, hurdle).run()


class _Search:
    def __init__(self, pool, expected, load, curve, cost, may_move, hurdle) -> None:
        self._pool: FlatPool = pool
        self._expected: Outlook = expected
        self._curve: RateCurve = curve
        self._cost: Callable[[np.ndarray, np.ndarray, np.ndarray], MoveCost] = cost
        self._may_move: Callable[[int, int, int], bool] = may_move
        self._hurdle: Hurdle = hurdle
        self._alive, self._log_done = load.alive.copy(), load.log_done.copy()
        self._done_s = load.finish_seconds(curve)
        self._free = pool.num_free.copy()
        self._left = np.diff(pool.start)
        self._used = np.zeros(len(pool.instance), dtype=bool)
        remaining = expected.mean_remaining[expected.cell(pool.response_tokens)]
        self._longest_first = np.lexsort((pool.context_tokens, -remaining, pool.instance))

    def run(self) -> list[FoundMove]:
        found: list[FoundMove] = []
        pairs_left = ROUND_PAIRS
        for _ in range(MAX_ROUNDS):
            source, destination = self._pairs()
            if not len(source) or pairs_left <= 0:
                break
            pairs_left -= len(source)
            if not self._round(source, destination, found):
                break
        return found

    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """[P] sources, latest first, and [P] destinations, earliest first."""
        order = np.argsort(-self._done_s, kind="stable")
        source = order[self._left[order] > 0]
        destination = order[::-1][self._free[order[::-1]] > 0]
        most = min(len(source), len(destination), MAX_PAIRS)
        source, destination = source[:most], destination[:most]
        later, earlier = self._done_s[source], self._done_s[destination]
        apart = later - earlier > self._hurdle.gain_share * later + self._hurdle.least_s
        return source[apart], destination[apart]

    def _round(self, source: np.ndarray, destination: np.ndarray, found: list[FoundMove]) -> bool:
        """Add the best move of every pair; False when there is none that could be tried again."""
        sample = self._candidates(source)
        later = np.maximum(self._done_s[source], self._done_s[destination])[:, None]
        rows = self._expected.cell(self._pool.response_tokens[sample])
        after = np.maximum(
            self._moved(source, rows, -1.0).finish_seconds(self._curve),
            self._moved(destination, rows, 1.0).finish_seconds(self._curve),
        )
        cost = self._cost(sample, source, destination)
        # nothing is gained before the sample is there
        in_time = np.clip(1.0 - cost.ready_s / np.maximum(self._done_s[source][:, None], 1e-9), 0.0, 1.0)
        gain = (later - after) * in_time - self._hurdle.cost_margin * cost.lost_s
        gain[self._used[sample]] = -np.inf
        best = gain.argmax(axis=1)
        tried = False
        for pair, column in enumerate(best.tolist()):
            value = float(gain[pair, column])
            late_s = float(later[pair, 0])
            if value <= self._hurdle.gain_share * late_s + self._hurdle.least_s:
                continue
            tried = True
            chosen, s, d = int(sample[pair, column]), int(source[pair]), int(destination[pair])
            self._used[chosen] = True
            if not self._may_move(chosen, s, d):
                continue
            found.append(
                FoundMove(
                    sample=chosen,
                    source=s,
                    destination=d,
                    mode=MoveMode.RECOMPUTE if cost.recompute[pair, column] else MoveMode.MIGRATE,
                    gain_s=value,
                    later_s=late_s,
                    earlier_s=float(self._done_s[d]),
                )
            )
            self._apply(s, d, int(rows[pair, column]))
        changed = np.concatenate([source, destination])
        self._done_s[changed] = self._of(changed).finish_seconds(self._curve)
        return tried

    def _candidates(self, source: np.ndarray) -> np.ndarray:
        """[P, C] samples of each source, spread from the longest expected remainder to the shortest."""
        start, size = self._pool.start[source], np.diff(self._pool.start)[source]
        most = max(MIN_CANDIDATES, ROUND_CANDIDATES // len(source))
        share = np.linspace(0.0, 1.0, min(most, int(size.max())))
        place = start[:, None] + np.rint(share * (size[:, None] - 1)).astype(np.int64)
        return self._longest_first[place]

    def _of(self, instance: np.ndarray) -> Load:
        return Load(
            cell_tokens=self._expected.cell_tokens,
            alive=self._alive[instance],
            log_done=self._log_done[instance],
        )

    def _moved(self, instance: np.ndarray, rows: np.ndarray, sign: float) -> Load:
        """[P, C] the instances with one sample more or less."""
        return Load(
            cell_tokens=self._expected.cell_tokens,
            alive=self._alive[instance][:, None] + sign * self._expected.alive[rows],
            log_done=self._log_done[instance][:, None] + sign * self._expected.log_done[rows],
        )

    def _apply(self, source: int, destination: int, row: int) -> None:
        # the slot that the source will have is not there yet
        for instance, sign in ((source, -1.0), (destination, 1.0)):
            self._alive[instance] += sign * self._expected.alive[row]
            self._log_done[instance] += sign * self._expected.log_done[row]
        self._free[destination] -= 1
        self._left[source] -= 1
