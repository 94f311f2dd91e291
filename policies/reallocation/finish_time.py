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
    "[L, 3, X] what one sample adds to each sum of a `Load`"
    mean_remaining: np.ndarray
    "[L] expected further tokens"

    def cell(self, response_tokens: np.ndarray) -> np.ndarray:
        """The row of each length."""
        return np.minimum(response_tokens // self.cell_tokens, len(self.terms) - 1)

    def counts(self, instance: np.ndarray, response_tokens: np.ndarray, num_instances: int) -> np.ndarray:
        """[K, L] samples by instance and cell; `instance` [n] is the number of each sample's instance."""
        rows = len(self.terms)
        flat = np.bincount(
            instance * rows + self.cell(response_tokens), minlength=num_instances * rows
        ).reshape(num_instances, rows)
        return flat.astype(np.float64)

    def load(self, counts: np.ndarray) -> Load:
        """What is expected of instances with these samples; `counts` [K, L]."""
        # not by BLAS: its threads wait for each other where decode threads hold the cores
        terms = self.terms.reshape(len(self.terms), -1).astype(np.float32)
        summed = np.einsum("kl,lx->kx", counts.astype(np.float32), terms).astype(np.float64)
        summed = summed.reshape(len(counts), *self.terms.shape[1:])
        return Load(cell_tokens=self.cell_tokens, sums=summed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is expected of instances, or of several cases of each; X cells of further tokens."""

    cell_tokens: int
    "width of a cell"
    sums: np.ndarray
    """[..., 3, X] over samples: the number that still runs, the log of the probability that none does, the context
    tokens of those that do"""

    def course(self, curve: RateCurve) -> Course:
        """How the instances go on."""
        *shape, _, cells = self.sums.shape
        sums = self.sums.reshape(-1, 3, cells)
        any_left, cell_s = np.empty((2, len(sums), cells))
        for first in range(0, len(sums), CASES):
            rows = slice(first, first + CASES)
            alive, log_done, context = (sums[rows, term].astype(np.float64, copy=False) for term in range(3))
            left = np.negative(np.expm1(np.minimum(log_done, 0.0)), out=any_left[rows])
            given = np.maximum(left, SURE)
            token_s = curve.seconds_per_token(
                np.maximum(alive, left) / given, np.maximum(context, 0.0) / given
            )
            np.multiply(token_s, self.cell_tokens, out=cell_s[rows])
        return Course(any_left=any_left.reshape(*shape, cells), cell_s=cell_s.reshape(*shape, cells))


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How instances go on, cell by cell of further tokens."""

    any_left: np.ndarray
    "[..., X] probability that a sample still runs"
    cell_s: np.ndarray
    "[..., X] seconds that the cell takes then"

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
    alive = np.clip(alive, 0.0, 1.0)
    context = prompt_tokens + lengths[:, None] + width * (np.arange(rows) + 0.5)
    return Outlook(
        cell_tokens=width,
        terms=np.stack([alive, np.log1p(-np.minimum(alive, 1.0 - SURE)), alive * context], axis=1),
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
    together = np.diff(until, axis=1, prepend=0.0).reshape(one.cell_s.shape)
    alone_s = (one.any_left * (one.cell_s - together)).sum(axis=-1)
    return alone_s + reached[:, -1].reshape(alone_s.shape)
