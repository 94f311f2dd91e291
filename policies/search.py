"""The search for the best nodes to verify (design 3.2): all samples' candidates compete for the step's time.

Every node is worth its estimated acceptance; a second is worth `goodput` tokens, what the batch yields at its best.
So the choice maximises   expected tokens - goodput * seconds,   the exchange rate at which tokens over time is
largest. Two allocations are compared: the same number for every sample, and ragged (scattered rows cost extra).
Cumulative sums in score order make each a handful of array operations.
"""

from __future__ import annotations

import numpy as np

from policies.cost_view import CostView


def best_uniform(scores: np.ndarray, costs: CostView, goodput: float) -> tuple[int, float]:
    """Return the best common number of nodes and its worth in tokens. `scores` [B, C] descending in each row."""
    expected = np.concatenate([[0.0], scores.sum(axis=0).cumsum()])
    limit = min(len(expected), len(costs.uniform_s))
    worth = expected[:limit] - goodput * costs.uniform_s[:limit]
    best = int(worth.argmax())
    return best, float(worth[best])


def best_ragged(scores: np.ndarray, costs: CostView, goodput: float) -> tuple[np.ndarray, float]:
    """Return the best number of nodes of each sample and their worth. `scores` [B, C] descending in each row.

    For every cap on a sample's nodes, the best ones below it in score order: no other allocation is worth more.
    """
    batch, candidates = scores.shape
    candidates = min(candidates, len(costs.widest_s) - 1)
    flat = scores[:, :candidates].ravel()
    order = np.argsort(-flat, kind="stable")
    caps = np.arange(1, candidates + 1)
    allowed = order % candidates < caps[:, None]
    expected = (allowed * flat[order]).cumsum(axis=1)
    seconds = costs.tokens_s[allowed.cumsum(axis=1)] + costs.widest_s[caps, None]
    worth = expected - goodput * seconds
    cap, last = divmod(int(worth.argmax()), len(order))
    none = -goodput * float(costs.tokens_s[0] + costs.widest_s[0])
    if worth[cap, last] <= none:
        return np.zeros(batch, dtype=np.int64), none
    chosen = order[: last + 1][allowed[cap, : last + 1]]
    return np.bincount(chosen // candidates, minlength=batch), float(worth[cap, last])


def sorted_scores(scores: np.ndarray, level_sizes: tuple[int, ...]) -> np.ndarray:
    """Return each sample's scores in descending order; a chain's already are."""
    if scores.shape[1] == len(level_sizes):
        return scores
    return -np.sort(-scores, axis=1)
