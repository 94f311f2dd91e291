"""Where ranks put what the others read: two places of each rank, in turn, so that none waits for its readers."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from rlhfspec.engine.cache.shared_memory import SharedFile
from rlhfspec.engine.parts import Share

_LEAST_BYTES = 1 << 20


class Meeting:
    """A rank's view of memory that all see. All ranks put the same shapes, one after the other."""

    def __init__(self, memory: SharedFile, share: Share) -> None:
        self._memory, self._share = memory, share
        self._places = torch.empty(2, share.ranks, 0, dtype=torch.uint8)
        self._end_bytes = self._turn = 0

    def put(self, mine: Tensor) -> Tensor:
        """Put it in this rank's place; return those of all ranks, [ranks, ...], complete once all have put theirs.

        They are read before this rank puts the next.
        """
        size = mine.numel() * mine.element_size()
        if size > self._places.shape[2]:
            self._make_room(max(_LEAST_BYTES, 1 << (size - 1).bit_length()))
        self._turn = 1 - self._turn
        everyone = self._places[self._turn, :, :size].view(mine.dtype).view(self._share.ranks, *mine.shape)
        everyone[self._share.rank].copy_(mine)
        return everyone

    def _make_room(self, size: int) -> None:
        """Make larger places behind the old ones, which others may still read; all ranks do so with the same put."""
        num_bytes = 2 * self._share.ranks * size
        os.ftruncate(self._memory.descriptor, self._end_bytes + num_bytes)
        mapped = mmap.mmap(self._memory.descriptor, num_bytes, offset=self._end_bytes)
        self._places = torch.frombuffer(mapped, dtype=torch.uint8).view(2, self._share.ranks, size)
        self._end_bytes += num_bytes
