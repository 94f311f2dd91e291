"""What drafts yield: from an acceptance length or an acceptance by level to accepted nodes of chains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def even_acceptance(length: float, depth: int) -> float:
    """Acceptance of each level, given the one before it, with which a chain of `depth` yields `length` tokens a step.

    That is the p of 1 + p + .. + p^depth = length; 1 where length is depth + 1.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2.0
        if float((middle ** np.arange(depth + 1)).sum()) < length:
            low = middle
        else:
            high = middle
    return high


def accepted_nodes(acceptance: Sequence[float], levels: int) -> np.ndarray:
    """[levels + 1] expected accepted nodes of chains of 0, 1, .. levels.

    Args:
        acceptance: of each level given those before it; the last one goes on.
        levels: of the longest chain.
    """
    given = np.array([acceptance[min(level, len(acceptance) - 1)] for level in range(levels)])
    return np.concatenate([[0.0], np.cumsum(np.cumprod(given))])
