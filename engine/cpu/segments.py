"""Attention by our own code inside any forward: stretches of tokens that are computed, and one layer's attention."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from engine.cache.kv_pool import KVPool
from engine.cpu.attention import BLOCK_ROWS, SEGMENT_FIELDS
from engine.cpu.program import native_code
from engine.cpu.writer import LOG2_E

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


def attend_segments(
    pool: KVPool,
    layer: int,
    qkv: Tensor,
    segments: Segments,
    *,
    scaling: float,
    softcap: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Store the tokens' keys and values; return what their queries attend to, [M, Hkv * queries * E].

    Args:
        pool: float32, on the CPU.
        layer: whose cells.
        qkv: float32 [M, Hkv, queries + 2, E]; tokens behind the segments' are padding.
        segments: from `segments_of`.
        scaling: of the scores.
        softcap: bounds scores by cap * tanh(score / cap); None: they are not bounded.
        sliding_window: how many tokens back a token sees, itself included; None: all.
    """
    store_segments(pool, layer, qkv, segments)
    _, heads, lanes, size = qkv.shape
    queries = lanes - 2
    out = qkv.new_zeros(len(qkv), heads * queries * size)
    block = block_tokens(queries)
    weights = qkv.new_empty(block * queries, pool.capacity)
    native_code(size).operations["attend"](
        out.data_ptr(),
        qkv.data_ptr(),
        pool.cells[layer].data_ptr(),
        segments.ctypes.data,
        weights.data_ptr(),
        len(segments),
        pool.num_slots,
        heads,
        queries,
        pool.capacity,
        block,
        sliding_window or 0,
        scaling * LOG2_E,
        (softcap or 0.0) * LOG2_E,
    )
    return out


def store_segments(pool: KVPool, layer: int, qkv: Tensor, segments: Segments) -> None:
    """Store the tokens' keys and values; arguments as of `attend_segments`, qkv contiguous.

    Raises ModelError when they are not of the pool's shape: what is called here checks nothing.
    """
    _, heads, lanes, size = qkv.shape
    pool.require_cells(heads, size)
    native_code(size).operations["store"](
        pool.cells[layer].data_ptr(),
        qkv.data_ptr(),
        segments.ctypes.data,
        len(segments),
        pool.num_slots,
        heads,
        lanes,
        pool.capacity,
    )


def block_tokens(queries: int) -> int:
    """Tokens whose weights are kept at a time."""
    return max(1, BLOCK_ROWS // queries)
