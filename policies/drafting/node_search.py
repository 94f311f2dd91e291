"""The search for the best nodes to verify (design 3.2): all samples' candidates compete for the step's time.

Every node is worth its estimated acceptance; a second is worth `goodput` tokens, what the batch yields at its best.
So the choice maximises   expected tokens - goodput * seconds,   the exchange rate at which tokens over time is
largest. Two allocations are compared: the same number for every sample, and ragged (scattered rows cost extra).
Cumulative sums in score order make each a handful of array operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cost_view import CostView, step_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """A choice of nodes in two numbers, which choose among other scores of the same kind too."""

    price: float
    "the least score that was worth a node"
    most: int | None = None
    "nodes of a sample, where more of them were not worth the width"

    def of(self, scores: np.ndarray) -> np.ndarray:
        """Return each sample's number of nodes. `scores` [B, C] descending in each row."""
        return np.count_nonzero(scores[:, : self.most] >= self.price, axis=1)


def allocation_of(counts: np.ndarray, scores: np.ndarray) -> Allocation:
    """Return what chose `counts` of `scores` [B, C]; equal counts are not a matter of scores."""
    most = int(counts.max())
    if most == counts.min():
        return Allocation(price=-np.inf, most=most)
    served = np.flatnonzero(counts)
    price = float(scores[served, counts[served] - 1].min())
    is_capped = bool((scores[:, most:] >= price).any())
    return Allocation(price=price, most=most if is_capped else None)


def best_nodes(scores: np.ndarray, costs: CostView, goodput: float) -> tuple[np.ndarray, Allocation]:
    """Return the best number of nodes of each sample and what chose them. `scores` [B, C] descending in each row."""
    batch = len(scores)
    count, worth = best_uniform(scores, costs, goodput)
    counts = np.full(batch, count, dtype=np.int64)
    if batch == 1:
        return counts, Allocation(price=goodput * step_at(costs.uniform_s, count))
    ragged_counts, ragged_worth = best_ragged(scores, costs, goodput)
    if ragged_worth > worth:
        counts = ragged_counts
    return counts, allocation_of(counts, scores)


def best_uniform(scores: np.ndarray, costs: CostView, goodput: float) -> tuple[int, float]:
    """Return the best common number of nodes and its worth in tokens. `scores` [B, C] descending in each row.

    The costs may be those of a batch a little larger than B: this one's share of them counts.
    """
    expected = np.concatenate([[0.0], scores.sum(axis=0).cumsum()])
    limit = min(len(expected), len(costs.uniform_s))
    rate = goodput * len(scores) / costs.num_samples
    worth = expected[:limit] - rate * costs.uniform_s[:limit]
    best = int(worth.argmax())
    return best, float(worth[best])


def best_ragged(scores: np.ndarray, costs: CostView, goodput: float) -> tuple[np.ndarray, float]:
    """Return the best number of nodes of each sample and their worth. `scores` [B, C] descending in each row.

    For every cap on a sample's nodes, the best ones below it in score order: no other allocation is worth more.
    """
    batch = len(scores)
    widest_s = costs.widest_s * (batch / costs.num_samples)
    none = -goodput * float(costs.tokens_s[0] + widest_s[0])
    # what is not worth the cheapest token is out; tokens become dearer, so that is the first one
    least = goodput * float(costs.tokens_s[1] - costs.tokens_s[0])
    row, column = np.nonzero(scores[:, : len(widest_s) - 1] > least)
    if not len(row):
        return np.zeros(batch, dtype=np.int64), none
    value = scores[row, column]
    order = np.argsort(-value, kind="stable")
    row, column = row[order], column[order]
    caps = np.arange(1, int(column.max()) + 2)
    allowed = column < caps[:, None]
    expected = (allowed * value[order]).cumsum(axis=1)
    seconds = costs.tokens_s[allowed.cumsum(axis=1)] + widest_s[caps, None]
    worth = expected - goodput * seconds
    cap, last = divmod(int(worth.argmax()), len(order))
    if worth[cap, last] <= none:
        return np.zeros(batch, dtype=np.int64), none
    chosen = row[: last + 1][allowed[cap, : last + 1]]
    return np.bincount(chosen, minlength=batch), float(worth[cap, last])


def sorted_scores(scores: np.ndarray, level_sizes: tuple[int, ...]) -> np.ndarray:
    """Return each sample's scores in descending order; a chain's already are."""
    if scores.shape[1] == len(level_sizes):
        return scores
    return -np.sort(-scores, axis=1)
