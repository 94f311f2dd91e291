"""Where ranks put what the others read: parts of sums, and weights that come.

Of sums each rank has two places, in turn, so that none waits for its readers.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.shared_memory import SharedFile
from ..parts import Share
from ..weights.chunks import CHUNK_BYTES

_LEAST_BYTES = 1 << 20
_ALIGNED = 64


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
        mapped = _mapped(self._memory, num_bytes, offset=self._end_bytes)
        self._places = mapped.view(2, self._share.ranks, size)
        self._end_bytes += num_bytes


@dataclass(frozen=True, slots=True)
class Written:
    """Where a bucket of weights lies."""

    num_bytes: int
    "of all the memory there"
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]
    "name, type, shape and first byte"


class Buckets:
    """Memory for one bucket of weights at a time, which the leader writes and each rank reads its share of."""

    def __init__(self, memory: SharedFile) -> None:
        self._memory = memory
        self._room = torch.empty(0, dtype=torch.uint8)

    def write(self, bucket: Mapping[str, Tensor]) -> Written:
        """Copy these tensors there, over those before."""
        tensors, used = list[tuple[str, torch.dtype, tuple[int, ...], int]](), 0
        for name, tensor in bucket.items():
            tensors.append((name, tensor.dtype, tuple(tensor.shape), used))
            used += _padded(tensor)
        if used > len(self._room):
            os.ftruncate(self._memory.descriptor, used)
            self._room = _mapped(self._memory, used)
        written = Written(len(self._room), tuple(tensors))
        for name, place in self._views(written).items():
            place.copy_(bucket[name])
        return written

    def read(self, written: Written) -> dict[str, Tensor]:
        """Return the tensors as they lie there."""
        if len(self._room) != written.num_bytes:
            self._room = _mapped(self._memory, written.num_bytes)
        return self._views(written)

    def _views(self, written: Written) -> dict[str, Tensor]:
        return {
            name: self._room[at : at + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
            for name, dtype, shape, at in written.tensors
        }


def buckets_of(parts: Iterable[Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Cut parts of a weight version into buckets of whole tensors; one that is larger is a bucket of its own."""
    for part in parts:
        bucket, used = dict[str, Tensor](), 0
        for name, tensor in part.items():
            if used and used + _padded(tensor) > CHUNK_BYTES:
                yield bucket
                bucket, used = {}, 0
            bucket[name] = tensor
            used += _padded(tensor)
        if bucket:
            yield bucket


def _padded(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return size + -size % _ALIGNED


def _mapped(memory: SharedFile, num_bytes: int, offset: int = 0) -> Tensor:
    return torch.frombuffer(mmap.mmap(memory.descriptor, num_bytes, offset=offset), dtype=torch.uint8)
