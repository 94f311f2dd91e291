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
    """Return the best number of nodes of each sample and their worth. `scores` [B, C] descending in each row."""
    batch, candidates = scores.shape
    candidates = min(candidates, len(costs.widest_s) - 1)
    flat = scores[:, :candidates].ravel()
    order = np.argsort(-flat, kind="stable")
    expected = np.concatenate([[0.0], flat[order].cumsum()])
    place = order % candidates + 1
    widest = np.concatenate([[0], np.maximum.accumulate(place)])
    worth = expected - goodput * (costs.tokens_s[: len(expected)] + costs.widest_s[widest])
    best = int(worth.argmax())
    return np.bincount(order[:best] // candidates, minlength=batch), float(worth[best])


def sorted_scores(scores: np.ndarray, level_sizes: tuple[int, ...]) -> np.ndarray:
    """Return each sample's scores in descending order; a chain's already are."""
    if scores.shape[1] == len(level_sizes):
        return scores
    return -np.sort(-scores, axis=1)
