"""The search for moves that pay: pairs of instances, the best sample of each pair, again and again.

The instance that will be done last is paired with the one that will be done first, the second last with the second
first, and so on. For each pair the question is which sample, moved, has both done soonest. In large pools any of the
late ones may turn out to be the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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
PAIRS_AT_ONCE = 32
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


class FoundMove(NamedTuple):
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
        self._load, self._course = load, load.course(curve)
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
        mean = self._load.sums.mean(axis=1, keepdims=True)
        share = Load(cell_tokens=self._load.cell_tokens, sums=mean).course(self._curve)
        before = both_done_seconds(self._course.of(source), self._course.of(destination))
        gain = before - both_done_seconds(share, share)
        more, fewer = self._placed[source], self._placed[destination]
        return self._hurdle.may_pay(more, fewer) & (gain >= self._hurdle.start_share * self._whole_s)

    def _round(self, source: np.ndarray, destination: np.ndarray, found: list[FoundMove]) -> bool:
        """Add the best move of every pair; False when there is none that could be tried again."""
        sample = self._candidates(source)
        late, early = self._course.of(source), self._course.of(destination)
        before = both_done_seconds(late, early)[:, None]
        rows = self._expected.cell(self._pool.response_tokens[sample])
        cost = self._cost(sample, source, destination)
        shrinks = before - self._moved(late, early, rows)
        migrate = self._worth(shrinks, before, cost.migrate_s, cost.migrate_lost_s)
        recompute = self._worth(shrinks, before, cost.recompute_s, cost.recompute_lost_s)
        gain = np.where(self._used[sample], -np.inf, np.maximum(migrate, recompute))
        pair = np.arange(len(source))
        column = gain.argmax(axis=1)
        pays = gain[pair, column] > 0
        best = sample[pair, column]
        self._used[best[pays]] = True
        wanted = zip(best.tolist(), source.tolist(), destination.tolist(), pays.tolist(), strict=True)
        taken = np.array([pay and self._may_move(c, s, d) for c, s, d, pay in wanted])
        source, destination, pair, column = source[taken], destination[taken], pair[taken], column[taken]
        anew = (recompute > migrate)[pair, column]
        modes = [MoveMode.RECOMPUTE if is_anew else MoveMode.MIGRATE for is_anew in anew]
        times = (gain[pair, column], self._done_s[source], self._done_s[destination])
        ends = (array.tolist() for array in (best[taken], source, destination))
        found += map(FoundMove, *ends, modes, *(array.tolist() for array in times))
        self._apply(source, destination, *self._ends(late.of(pair), early.of(pair), rows[pair, column]))
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

    def _moved(self, late: Course, early: Course, rows: np.ndarray) -> np.ndarray:
        """[P, C] expected seconds until both instances of a pair, [P], are done with one of these samples moved."""
        seconds = np.empty(rows.shape)
        for first in range(0, len(rows), PAIRS_AT_ONCE):
            pairs = slice(first, first + PAIRS_AT_ONCE)
            ends = self._ends(late.of((pairs, None)), early.of((pairs, None)), rows[pairs])
            seconds[pairs] = both_done_seconds(*ends)
        return seconds

    def _ends(self, late: Course, early: Course, rows: np.ndarray) -> tuple[Course, Course]:
        """How the ones go on with a sample of these lengths less, and the others with one more."""
        alive, context = (self._expected.terms[term][rows] for term in (0, 2))
        done = 1.0 - alive
        without = np.minimum(late.none_left / done, 1.0)
        pace = (self._curve, self._expected.cell_tokens)
        return (
            Course.by(*pace, late.alive - alive, without, late.context_tokens - context),
            Course.by(*pace, early.alive + alive, early.none_left * done, early.context_tokens + context),
        )

    def _apply(self, source: np.ndarray, destination: np.ndarray, late: Course, early: Course) -> None:
        """Note that sources and destinations, none named twice, have a sample less and more and go on like this."""
        for instance, course in ((source, late), (destination, early)):
            for whole, part in zip(self._course, course, strict=True):
                whole[instance] = part
            self._done_s[instance] = course.finish_seconds()
        # the slot that a source will have is not there yet
        self._free[destination] -= 1
        self._left[source] -= 1
