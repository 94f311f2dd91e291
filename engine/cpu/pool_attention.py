"""Attention by our own code inside any forward: one layer's, over segments of tokens (`engine.cpu.attention`)."""

from __future__ import annotations

from torch import Tensor

from ..attention.backends import LOG2_E
from ..cache.kv_pool import KVPool
from ..cache.segments import Segments
from ..model.compute_backend import PoolAttention
from .attention import BLOCK_ROWS
from .program import native_code


class CpuAttention(PoolAttention):
    """Every output is computed in order of position: bitwise the same alone, in a batch, in a tree."""

    def __init__(self, width: int | None = None) -> None:
        """`width`: floats in a vector; the processor's widest by default. Results do not depend on it."""
        self._width = width

    def store(self, pool: KVPool, layer: int, qkv: Tensor, segments: Segments) -> None:
        """See `PoolAttention.store`."""
        _, heads, lanes, size = qkv.shape
        # what is called here checks nothing
        pool.require_cells(heads, size)
        # a stock module may compute in bfloat16; the cells are float32
        qkv = qkv.float().contiguous()
        native_code(size, self._width).operations["store"](
            cells=pool.cells[layer].data_ptr(),
            qkv=qkv.data_ptr(),
            segments=segments.ctypes.data,
            num=len(segments),
            slots=pool.num_slots,
            slot_heads=heads,
            heads=heads,
            lanes=lanes,
            capacity=pool.capacity,
        )

    def attend(
        self,
        pool: KVPool,
        layer: int,
        qkv: Tensor,
        segments: Segments,
        *,
        scaling: float,
        softcap: float | None,
        sliding_window: int | None,
    ) -> Tensor:
        """See `PoolAttention.attend`."""
        qkv = qkv.float().contiguous()
        self.store(pool, layer, qkv, segments)
        _, heads, lanes, size = qkv.shape
        queries = lanes - 2
        out = qkv.new_zeros(len(qkv), heads * queries * size)
        block = block_tokens(queries)
        weights = qkv.new_empty(block * queries, pool.capacity)
        native_code(size, self._width).operations["attend"](
            out=out.data_ptr(),
            qkv=qkv.data_ptr(),
            cells=pool.cells[layer].data_ptr(),
            segments=segments.ctypes.data,
            weights=weights.data_ptr(),
            num=len(segments),
            slots=pool.num_slots,
            slot_heads=heads,
            heads=heads,
            queries=queries,
            capacity=pool.capacity,
            block=block,
            window=sliding_window or 0,
            scale=scaling * LOG2_E,
            cap=(softcap or 0.0) * LOG2_E,
        )
        return out


def block_tokens(queries: int) -> int:
    """Tokens whose weights are kept at a time."""
    return max(1, BLOCK_ROWS // queries)
