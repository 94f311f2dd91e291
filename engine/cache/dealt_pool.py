"""The cache of a model that is dealt to the ranks of a group: each rank has the cells of its own heads.

Whoever handles slots, on the leader, handles those of all ranks: what is done to the leader's cells is ordered of the
others; orders that nobody awaits go with the next one. Frames hold all heads, so that samples move between groups of
other sizes by the same bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from ..parts import Ranks, Share
from .kv_memory import KVMemory
from .kv_pool import KVPool, KVShape


class RankPool(KVPool):
    """One rank's cells, of its own heads."""

    def __init__(self, shape: KVShape, *, whole: KVShape, ranks: Ranks, **how: Any) -> None:
        """As `KVPool`, of this rank's `shape`; `whole` is that of the model."""
        super().__init__(shape, **how)
        self._ranks, self.frame_heads = ranks, whole.num_kv_heads

    def read(self, slot: int, start: int, stop: int) -> Float[Tensor, "L 2 H T E"]:
        """See `KVPool`; all ranks call it at once."""
        shares = [Share(rank=rank, ranks=self._ranks.share.ranks) for rank in range(self._ranks.share.ranks)]
        counts = [len(share.of(self.frame_heads)) for share in shares]
        mine = self.range_of(slot, start, stop)
        missing = max(counts) - mine.shape[2]
        everyone = self._ranks.exchange(F.pad(mine, (0, 0, 0, 0, 0, missing)))
        return torch.cat([of[:, :, :count] for of, count in zip(everyone, counts, strict=True)], dim=2)

    def store(self, slot: int, start: int, cells: Float[Tensor, "L 2 H T E"]) -> None:
        """See `KVPool`."""
        own = self._ranks.share.of(self.frame_heads)
        # a rank without heads has the cells of one, which nobody reads
        if len(own):
            super().store(slot, start, cells[:, :, own.start : own.stop])


class LeaderPool(RankPool):
    """The leader's, which gives the orders. Of all heads: `read`, `store`, bytes."""

    def __init__(self, shape: KVShape, *, whole: KVShape, ranks: Ranks, **how: Any) -> None:
        """See `RankPool`."""
        super().__init__(shape, whole=whole, ranks=ranks, **how)
        self.memory: KVMemory = _DealtMemory(self.memory, ranks, shape.num_kv_heads, whole.num_kv_heads)

    def make_dense(
        self, root: Int[Tensor, " B"], path: Int[Tensor, "B D"], moved: Bool[Tensor, "B D"]
    ) -> None:
        """See `KVPool`."""
        # on a GPU the host has not seen whether there is anything to do
        if self.device.type != "cpu" or bool(moved.any()):
            self._ranks.later("make_dense", root, path, moved)
            super().make_dense(root, path, moved)

    def copy_slot(self, source: int, target: int, length: int) -> None:
        """See `KVPool`."""
        self._ranks.later("copy_slot", source=source, target=target, length=length)
        super().copy_slot(source, target, length)

    def move_slot(self, source: int, target: int, length: int) -> None:
        """See `KVPool`."""
        self._ranks.later("move_slot", source=source, target=target, length=length)
        super().move_slot(source, target, length)

    def clear(self, slot: int, start: int, stop: int) -> None:
        """See `KVPool`."""
        self._ranks.later("clear", slot=slot, start=start, stop=stop)
        super().clear(slot, start, stop)

    def read(self, slot: int, start: int, stop: int) -> Float[Tensor, "L 2 H T E"]:
        """See `KVPool`."""
        self._ranks.order("read", slot=slot, start=start, stop=stop)
        return super().read(slot, start, stop)

    def store(self, slot: int, start: int, cells: Float[Tensor, "L 2 H T E"]) -> None:
        """See `KVPool`."""
        self._ranks.order("store", cells, slot=slot, start=start)
        super().store(slot, start, cells)


class _DealtMemory:
    """The leader's memory of cells, and what is told of it. Bytes are those of all ranks."""

    def __init__(self, memory: KVMemory, ranks: Ranks, own_heads: int, num_heads: int) -> None:
        self._memory, self._ranks = memory, ranks
        self._own_heads, self._num_heads = own_heads, num_heads
        self.cells = memory.cells
        self._ordered = np.zeros(0, dtype=np.int64)

    @property
    def growth_bytes(self) -> int:
        """See `KVMemory`."""
        return self._memory.growth_bytes // self._own_heads * self._num_heads

    def bytes_of(self, num_tokens: Int[np.ndarray, " B"]) -> int:
        """See `KVMemory`."""
        return self._memory.bytes_of(num_tokens) // self._own_heads * self._num_heads

    def hold(self, num_tokens: Int[np.ndarray, " B"]) -> None:
        """See `KVMemory`; where no sample is left, the others give theirs back at once."""
        if not np.array_equal(num_tokens, self._ordered):
            tell = self._ranks.later if len(num_tokens) else self._ranks.order
            tell("hold", num_tokens=num_tokens)
        self._ordered = num_tokens
        self._memory.hold(num_tokens)

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """See `KVMemory`; told as `move_slot`."""
        self._memory.move(source, target, num_tokens)
