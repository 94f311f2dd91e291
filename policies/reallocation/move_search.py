"""The search for moves that pay: pairs of instances, the best sample of each pair, again and again.

The instance that will be done last is paired with the one that will be done first, the second last with the second
first, and so on. For each pair the question is which sample, moved, has both done soonest. In large pools any of the
late ones may turn out to be the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .finish_time import Course, Load, Outlook, both_done_seconds
from .gate import WayCosts
from .pool_records import MoveMode
from .rate_curve import RateCurve
from .sample_arrays import FlatPool

MAX_ROUNDS = 16
"Moves planned at once for one pair; in large pools fewer."
MAX_PAIRS = 64
"Pairs of a round: those furthest apart."
ROUND_PAIRS = 256
"Pairs of all rounds together."
ROUND_CANDIDATES = 256
"Candidate moves of a round over all its pairs; at least MIN_CANDIDATES for each."
MIN_CANDIDATES = 4
PAIRS_AT_ONCE = 16
"Whose candidates are computed at once: their arrays stay in the core's cache, and are no new pages each time."


@dataclass(frozen=True, slots=True, kw_only=True)
class Hurdle:
    """What a move must gain. Loads differ by chance all the time: few samples are not worth the stir."""

    cost_margin: float = 2.0
    "so many times what it costs, where .."
    start_share: float = 0.03
    "an even share of the pool's load would gain the pair this share of the rollout's whole time, past and to come .."
    chance: float = 1.5
    ".. and their numbers of samples differ by more than so many square roots of their sum"

    def may_pay(self, more: np.ndarray, fewer: np.ndarray) -> np.ndarray:
        """Whether numbers of samples differ by more than chance; of a pool the largest and the smallest do first."""
        return more - fewer > self.chance * np.sqrt(more + fewer)


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


class MoveSearch:
    """Of one plan; the pool's load changes with every move that is found."""

    def __init__(
        self,
        pool: FlatPool,
        expected: Outlook,
        load: Load,
        curve: RateCurve,
        *,
        cost: Callable[[np.ndarray, np.ndarray, np.ndarray], WayCosts],
        may_move: Callable[[int, int, int], bool],
        hurdle: Hurdle,
        elapsed_s: float = 0.0,
    ) -> None:
        """Begin with instances as they are.

        Args:
            pool: who is where, and what is free.
            expected: by length.
            load: [K] of the instances; it is used up.
            curve: of every instance.
            cost: of samples [P, C] from sources [P] to destinations [P].
            may_move: whether (sample, source, destination) is not resting.
            hurdle: what a move must gain.
            elapsed_s: since the rollout began.
        """
        self._pool, self._expected, self._curve = pool, expected, curve
        self._cost, self._may_move, self._hurdle = cost, may_move, hurdle
        self._sums, self._course = load.sums, load.course(curve)
        self._done_s = self._course.finish_seconds()
        self._whole_s = elapsed_s + float(self._done_s.max(initial=0.0))
        self._placed = pool.num_placed
        self._free = pool.num_free.copy()
        self._left = np.diff(pool.start)
        self._used = np.zeros(len(pool.instance), dtype=bool)
        self._longest_first = np.zeros(len(pool.instance), dtype=np.int64)
        "of the instances that are worth a look"

    def run(self) -> list[FoundMove]:
        """Return moves in the order in which they were found: no sample twice, no slot twice."""
        found: list[FoundMove] = []
        pairs_left = ROUND_PAIRS
        for number in range(MAX_ROUNDS):
            source, destination = self._pairs()
            if number == 0 and len(source):
                worth = self._worth_a_look(source, destination)
                source, destination = source[worth], destination[worth]
                is_source = np.bincount(source, minlength=len(self._left)) > 0
                self._left = np.where(is_source, self._left, 0)
                self._sort(np.flatnonzero(is_source[self._pool.instance]))
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
        apart = later > earlier
        return source[apart], destination[apart]

    def _worth_a_look(self, source: np.ndarray, destination: np.ndarray) -> np.ndarray:
        """[P] whether an even share of the pool's load would gain a pair enough."""
        share = self._load(self._sums.mean(axis=0)).course(self._curve)
        gain = self._both_done(source, destination) - both_done_seconds(share, share)
        more, fewer = self._placed[source], self._placed[destination]
        return self._hurdle.may_pay(more, fewer) & (gain >= self._hurdle.start_share * self._whole_s)

    def _round(self, source: np.ndarray, destination: np.ndarray, found: list[FoundMove]) -> bool:
        """Add the best move of every pair; False when there is none that could be tried again."""
        sample = self._candidates(source)
        before = self._both_done(source, destination)
        rows = self._expected.cell(self._pool.response_tokens[sample])
        cost = self._cost(sample, source, destination)
        shrinks = before[:, None] - self._moved(source, destination, rows)
        migrate = self._worth(shrinks, before[:, None], cost.migrate_s, cost.migrate_lost_s)
        recompute = self._worth(shrinks, before[:, None], cost.recompute_s, cost.recompute_lost_s)
        gain = np.where(self._used[sample], -np.inf, np.maximum(migrate, recompute))
        pair = np.arange(len(source))
        column = gain.argmax(axis=1)
        pays = gain[pair, column] > 0
        chosen = sample[pair, column]
        self._used[chosen[pays]] = True
        wanted = zip(chosen.tolist(), source.tolist(), destination.tolist(), pays.tolist(), strict=True)
        taken = np.array([pay and self._may_move(c, s, d) for c, s, d, pay in wanted])
        anew = (recompute > migrate)[pair, column]
        for p in np.nonzero(taken)[0].tolist():
            found.append(
                FoundMove(
                    sample=int(chosen[p]),
                    source=int(source[p]),
                    destination=int(destination[p]),
                    mode=MoveMode.RECOMPUTE if anew[p] else MoveMode.MIGRATE,
                    gain_s=float(gain[p, column[p]]),
                    later_s=float(self._done_s[source[p]]),
                    earlier_s=float(self._done_s[destination[p]]),
                )
            )
        self._apply(source[taken], destination[taken], rows[pair, column][taken])
        return bool(pays.any())

    def _worth(
        self, shrinks: np.ndarray, before: np.ndarray, ready_s: np.ndarray, lost_s: np.ndarray
    ) -> np.ndarray:
        """What is gained by one way: nothing before the sample is there, less what the way costs."""
        in_time = np.maximum(1.0 - ready_s / np.maximum(before, 1e-9), 0.0)
        worth = shrinks * in_time - self._hurdle.cost_margin * lost_s
        return np.where(in_time > 0, worth, -np.inf)

    def _sort(self, samples: np.ndarray) -> None:
        """Put these, which are all of their instances', in order: the longest expected remainder first."""
        pool = self._pool
        remaining = self._expected.mean_remaining[self._expected.cell(pool.response_tokens[samples])]
        order = np.lexsort((pool.context_tokens[samples], -remaining, pool.instance[samples]))
        self._longest_first[samples] = samples[order]

    def _candidates(self, source: np.ndarray) -> np.ndarray:
        """[P, C] samples of each source, spread from the longest expected remainder to the shortest."""
        start, size = self._pool.start[source], np.diff(self._pool.start)[source]
        most = max(MIN_CANDIDATES, ROUND_CANDIDATES // len(source))
        share = np.linspace(0.0, 1.0, min(most, int(size.max())))
        place = start[:, None] + np.rint(share * (size[:, None] - 1)).astype(np.int64)
        return self._longest_first[place]

    def _load(self, sums: np.ndarray) -> Load:
        return Load(cell_tokens=self._expected.cell_tokens, sums=sums)

    def _both_done(self, source: np.ndarray, destination: np.ndarray) -> np.ndarray:
        """[P] expected seconds until both instances of a pair are done."""
        one, other = (
            Course(any_left=self._course.any_left[ends], cell_s=self._course.cell_s[ends])
            for ends in (source, destination)
        )
        return both_done_seconds(one, other)

    def _moved(self, source: np.ndarray, destination: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """[P, C] the same with one sample of these lengths, [P, C], less at the one and more at the other."""
        seconds = np.empty(rows.shape)
        for first in range(0, len(rows), PAIRS_AT_ONCE):
            pairs = slice(first, first + PAIRS_AT_ONCE)
            terms = self._expected.terms[rows[pairs]]
            less = self._load(self._sums[source[pairs], None] - terms)
            more = self._load(self._sums[destination[pairs], None] + terms)
            seconds[pairs] = both_done_seconds(less.course(self._curve), more.course(self._curve))
        return seconds

    def _apply(self, source: np.ndarray, destination: np.ndarray, rows: np.ndarray) -> None:
        """Take samples of these lengths from sources to destinations; no instance is named twice."""
        for instance, sign in ((source, -1.0), (destination, 1.0)):
            self._sums[instance] += sign * self._expected.terms[rows]
            course = self._load(self._sums[instance]).course(self._curve)
            self._course.any_left[instance], self._course.cell_s[instance] = course.any_left, course.cell_s
            self._done_s[instance] = course.finish_seconds()
        # the slot that a source will have is not there yet
        self._free[destination] -= 1
        self._left[source] -= 1
