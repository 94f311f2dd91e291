"""The order in which prompts of several sources come, epoch by epoch, from (seed, epoch) and the weights alone.

`repeats` of a source is how often an epoch gives each of its prompts. Where all are 1, an epoch is every prompt
exactly once. Of 1.5, every epoch gives each prompt once and every second one again, the others in the next epoch:
what is left of whole rounds is taken from a stream of permutations of the source that goes on over the epochs, so
after any number of epochs two prompts of a source differ by at most one visit a round begun.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from rlhfspec.core.errors import DataError

MAX_EPOCH_PROMPTS = 200_000_000
_EXTRA_STREAM = 0xE87A
"Keeps the permutations of partial rounds apart from those of epochs."


def repeats_of(
    sizes: Sequence[int],
    weights: Sequence[float],
    *,
    weight_of: Literal["prompt", "source"],
    stopping: Literal["all_exhausted", "first_exhausted"],
) -> tuple[float, ...]:
    """Return how often an epoch gives each prompt of each source; 0 for a source without prompts.

    Args:
        sizes: prompts of each source.
        weights: above 0; only their ratios count.
        weight_of: prompt: visits of a prompt are in the ratio of the weights; source: visits of all its prompts
            are, as `datasets.interleave_datasets(probabilities=...)` draws.
        stopping: as in `datasets.interleave_datasets`. all_exhausted: every prompt comes at least once an epoch;
            first_exhausted: none comes twice.

    Raises:
        DataError: an epoch would be longer than 200 million prompts.
    """
    rates = [
        weight / (size if weight_of == "source" else 1) if size else 0.0
        for size, weight in zip(sizes, weights, strict=True)
    ]
    present = [rate for rate in rates if rate > 0]
    if not present:
        return tuple(rates)
    unit = min(present) if stopping == "all_exhausted" else max(present)
    repeats = tuple(rate / unit for rate in rates)
    total = sum(size * times for size, times in zip(sizes, repeats, strict=True))
    if total > MAX_EPOCH_PROMPTS:
        raise DataError(
            f"the weights of data.sources make an epoch of {total:,.0f} prompts, as the rarest come at least once; "
            f"expected at most {MAX_EPOCH_PROMPTS:,}; bring the weights closer together, or set data.stopping to "
            "first_exhausted"
        )
    return repeats


class EpochOrder:
    """Prompts of an epoch, by their places in the data set, where sources follow one another."""

    def __init__(self, sizes: Sequence[int], repeats: Sequence[float], *, seed: int, shuffle: bool) -> None:
        self._sizes = tuple(sizes)
        self._repeats = tuple(repeats)
        self._seed = seed
        self._shuffle = shuffle

    def order(self, epoch: int) -> np.ndarray:
        """Return [V] int64, the places visited in epoch `epoch`, counted from 0; any epoch costs the same."""
        starts = np.cumsum([0, *self._sizes[:-1]])
        visits = [int(start) + self._visits(source, epoch) for source, start in enumerate(starts)]
        if self._shuffle:
            return np.random.default_rng([self._seed, epoch]).permutation(np.concatenate(visits))
        # each source evenly over the epoch, in its own order
        at = np.concatenate([(np.arange(len(one)) + 0.5) / max(len(one), 1) for one in visits])
        return np.concatenate(visits)[np.argsort(at, kind="stable")]

    def _visits(self, source: int, epoch: int) -> np.ndarray:
        size, times = self._sizes[source], self._repeats[source]
        whole = math.floor(times)
        a_round = np.arange(size, dtype=np.int64)
        extra = (times - whole) * size
        first, last = math.floor(epoch * extra), math.floor((epoch + 1) * extra)
        parts = [a_round] * whole
        while first < last:
            number, begin = divmod(first, size)
            taken = min(size - begin, last - first)
            parts.append(self._round(source, number)[begin : begin + taken])
            first += taken
        return np.concatenate(parts) if parts else a_round[:0]

    def _round(self, source: int, number: int) -> np.ndarray:
        size = self._sizes[source]
        if not self._shuffle:
            return np.arange(size)
        return np.random.default_rng([self._seed, source, number, _EXTRA_STREAM]).permutation(size)
