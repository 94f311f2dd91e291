"""When will an instance be done? Expected seconds, from the lengths of its samples so far.

All samples of an instance get tokens at one speed, which depends on how many are left. So with x for further tokens
per sample:

    seconds = integral over x of  P(any sample needs more than x)  *  seconds_per_token(samples left, given that any is)

The first factor makes it an expected maximum: for lengths that are certain it is exact. Lengths and x are cut into
cells of a few tokens, so that whole pools are a few matrix products. The speed also depends on the contexts of those
that are left, which are expected in the same way.

What a move changes is when *both* of its instances are done: the expected later one of two times, not the later one of
two expected times. The latter shrinks whenever a sample leaves the later instance, as if its long tail were gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .rate_curve import RateCurve
from .survival import Survival

CELLS = 64
"Cells of a response's length; the prediction of a pool costs instances * cells * cells."
CASES = 64
"That are computed at once: their arrays stay in the core's cache."
SURE = 1e-9
"A sample is as good as alive or done within this."


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is expected of samples by their length so far. L cells of length, X cells of further tokens, L = X."""

    cell_tokens: int
    "width of a cell"
    terms: np.ndarray
    "[3, L, X] what one sample adds to each sum of a `Load`"
    mean_remaining: np.ndarray
    "[L] expected further tokens"

    def cell(self, response_tokens: np.ndarray) -> np.ndarray:
        """The row of each length."""
        return np.minimum(response_tokens // self.cell_tokens, len(self.mean_remaining) - 1)

    def counts(self, instance: np.ndarray, response_tokens: np.ndarray, num_instances: int) -> np.ndarray:
        """[K, L] samples by instance and cell; `instance` [n] is the number of each sample's instance."""
        rows = len(self.mean_remaining)
        flat = np.bincount(
            instance * rows + self.cell(response_tokens), minlength=num_instances * rows
        ).reshape(num_instances, rows)
        return flat.astype(np.float64)

    def load(self, counts: np.ndarray) -> Load:
        """What is expected of instances with these samples; `counts` [K, L]."""
        sums = np.empty((3, len(counts), self.terms.shape[-1]))
        # products so small that BLAS takes one thread: several wait for each other where decode threads hold the cores
        for first in range(0, len(counts), CASES):
            rows = slice(first, first + CASES)
            np.matmul(counts[rows], self.terms, out=sums[:, rows])
        return Load(cell_tokens=self.cell_tokens, sums=sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is expected of K instances; X cells of further tokens."""

    cell_tokens: int
    "width of a cell"
    sums: np.ndarray
    """[3, K, X] over samples: the number that still runs, the log of the probability that none does, the context
    tokens of those that do"""

    def course(self, curve: RateCurve) -> Course:
        """How the instances go on."""
        alive, log_done, context = self.sums
        none_left = np.exp(log_done)
        any_left, cell_s = np.empty_like(alive), np.empty_like(alive)
        for first in range(0, len(alive), CASES):
            rows = slice(first, first + CASES)
            part = Course.by(curve, self.cell_tokens, alive[rows], none_left[rows], context[rows])
            any_left[rows], cell_s[rows] = part.any_left, part.cell_s
        return Course(alive, none_left, context, any_left, cell_s)


class Course(NamedTuple):
    """How instances go on, or several cases of each; arrays are [..., X] over cells of further tokens."""

    alive: np.ndarray
    "samples that still run"
    none_left: np.ndarray
    "probability that none does"
    context_tokens: np.ndarray
    "of those that do"
    any_left: np.ndarray
    cell_s: np.ndarray
    "seconds that the cell takes then"

    @classmethod
    def by(cls, curve: RateCurve, cell_tokens: int, *sums: np.ndarray) -> Course:
        """With what cells of so many tokens take by a rate curve; `sums`: alive, none left, context tokens."""
        alive, none_left, context_tokens = sums
        any_left = 1.0 - none_left
        given = np.maximum(any_left, SURE)
        samples, context = np.maximum(alive, any_left), np.maximum(context_tokens, 0.0)
        samples /= given
        context /= given
        cell_s = curve.seconds_per_token(samples, context)
        cell_s *= cell_tokens
        return cls(alive, none_left, context_tokens, any_left, cell_s)

    def of(self, cases: Any) -> Course:
        """Return some of the cases, as arrays are indexed."""
        return Course(*(array[cases] for array in self))

    def finish_seconds(self) -> np.ndarray:
        """[...] expected seconds until the last sample is done."""
        return (self.any_left * self.cell_s).sum(axis=-1)


def outlook(survival: Survival, *, prompt_tokens: float = 0.0, cells: int = CELLS) -> Outlook:
    """Cut the survival curve into at most so many cells; each stands for the length in its middle.

    `prompt_tokens`: of a sample, in the mean.
    """
    limit = survival.limit
    width = -(-limit // cells)
    rows = -(-limit // width)
    lengths = np.minimum(np.arange(rows) * width + (width - 1) // 2, limit)
    # sums over cells by one cumulative sum: [t] = sum of P(length > u), u < t
    reach = rows * width
    summed = np.concatenate([[0.0], np.cumsum(survival.probability)])
    ends = np.minimum(lengths[:, None] + np.arange(0, reach + 1, width), limit + 1)
    inside = np.diff(summed[ends], axis=1)
    now = survival.probability[lengths][:, None]
    alive = np.where(now > 0, inside / (width * np.where(now > 0, now, 1.0)), 0.0)
    alive = np.clip(alive, 0.0, 1.0 - SURE)
    context = prompt_tokens + lengths[:, None] + width * (np.arange(rows) + 0.5)
    return Outlook(
        cell_tokens=width,
        terms=np.stack([alive, np.log1p(-alive), alive * context]),
        mean_remaining=survival.mean_remaining()[lengths],
    )


def both_done_seconds(one: Course, other: Course) -> np.ndarray:
    """[...] expected seconds until each of two instances is done, their lengths being independent."""
    # the later time = both times - the earlier one; and the earlier one = integral of P(both still run)
    cells = one.any_left.shape[-1]
    ends = np.cumsum(one.cell_s, axis=-1).reshape(-1, cells)
    knots, reached = np.zeros((2, len(ends), cells + 1))
    np.cumsum(other.cell_s.reshape(-1, cells), axis=-1, out=knots[:, 1:])
    np.cumsum((other.any_left * other.cell_s).reshape(-1, cells), axis=-1, out=reached[:, 1:])
    # one look-up for all rows: each row of times lies behind the one before
    row = np.arange(len(ends))[:, None] * (max(float(ends[:, -1].max()), float(knots[:, -1].max())) + 1.0)
    ends += row
    knots += row
    until = np.interp(ends.ravel(), knots.ravel(), reached.ravel()).reshape(ends.shape)
    # behind a row's last knot nothing runs any more
    np.copyto(until, reached[:, -1:], where=ends > knots[:, -1:])
    alone_s = one.cell_s.reshape(-1, cells) - until
    alone_s[:, 1:] += until[:, :-1]
    alone_s *= one.any_left.reshape(-1, cells)
    return (alone_s.sum(axis=-1) + reached[:, -1]).reshape(one.cell_s.shape[:-1])
