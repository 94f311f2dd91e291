"""Segments: stretches of one slot's tokens that a forward computes, for attention that works inside the pool."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from .kv_pool import KVPool

SEGMENT_FIELDS = ("slot", "first", "count", "start", "base", "columns", "seen", "depth")
"""Of each segment, as 64-bit integers: its slot; its first packed token and their number; the position of the first;
tokens that all see; columns behind them; addresses of what each token sees of the columns (bytes [count, columns];
0: a chain) and of the columns' depth (integers; 0: a chain)."""
Segments = np.ndarray
"[segments, SEGMENT_FIELDS] int64, by packed token"


def segments_of(
    pool: KVPool,
    *,
    slots: np.ndarray,
    counts: np.ndarray,
    starts: np.ndarray,
    bases: np.ndarray | None = None,
    seen: Tensor | None = None,
    depth: Tensor | None = None,
) -> Segments:
    """Return the table of stretches, packed one behind the other. Its tensors must outlive it.

    Args:
        pool: where keys and values go.
        slots: of each stretch.
        counts: its number of tokens.
        starts: the position of its first.
        bases: positions that all tokens of a tree see; none: chains.
        seen: what tokens see of the columns behind them, bool [segments, n, t]; rows beyond a count are not read.
        depth: of each column, int64 [segments, t].

    Raises:
        IndexError: tokens outside the pool, or a stretch without any.
    """
    end = int((starts + counts).max())
    if bases is not None and seen is not None:
        end = max(end, int(bases.max()) + seen.shape[2])
    first = min(int(slots.min()), int(starts.min()), int(counts.min()) - 1)
    if end > pool.capacity or int(slots.max()) >= pool.num_slots or first < 0:
        raise IndexError(
            f"tokens up to position {end} of slot {int(slots.max())} are to be written; "
            f"the pool has {pool.num_slots} slots of {pool.capacity}"
        )
    table = np.zeros((len(slots), len(SEGMENT_FIELDS)), dtype=np.int64)
    table[:, 0] = slots
    table[1:, 1] = np.cumsum(counts)[:-1]
    table[:, 2] = counts
    table[:, 3] = starts
    if bases is not None and seen is not None and depth is not None:
        table[:, 4] = bases
        table[:, 5] = seen.shape[2]
        table[:, 6] = seen.data_ptr() + np.arange(len(slots)) * seen.stride(0)
        table[:, 7] = depth.data_ptr() + np.arange(len(slots)) * (depth.stride(0) * depth.element_size())
    return table
