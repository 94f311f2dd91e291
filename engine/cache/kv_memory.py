"""Memory behind a KV pool's slots: all of it from the start, or page by page as samples grow (design 3.7).

A slot's addresses always reach to the longest sample there may be, so attention reads one stretch and no table of
blocks; what comes and goes is the memory behind them (as vAttention does: Prabhu et al. 2024, arXiv 2405.04437). Here:
all at once, and pages of the host. `engine.cache.cuda_memory` has pages of a GPU.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

VIEW_STEP = 32
_UNRESERVED = getattr(mmap, "MAP_NORESERVE", 0x4000)


def round_up(length: int, step: int = VIEW_STEP) -> int:
    """Round a length up to a multiple of `step`: few distinct view lengths."""
    return -(-length // step) * step


def copy_slot(cells: Float[Tensor, "L 2 S H C E"], source: int, target: int, num_tokens: int) -> None:
    """Copy the first tokens of a slot over another's."""
    cells[:, :, target, :, :num_tokens] = cells[:, :, source, :, :num_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """What a pool holds at most: [L, 2, S, H, C, E] cells."""

    num_layers: int
    num_slots: int
    num_kv_heads: int
    capacity: int
    "tokens of one slot, at least"
    head_size: int
    dtype: torch.dtype


@runtime_checkable
class KVMemory(Protocol):
    """Cells, and the memory behind them."""

    cells: Float[Tensor, "L 2 S H C E"]
    "what has no memory behind it reads as finite numbers"

    @property
    def growth_bytes(self) -> int:
        """Bytes that a slot takes more at once when it grows."""
        ...

    def bytes_of(self, num_tokens: Int[np.ndarray, " B"]) -> int:
        """Bytes behind the first num_tokens[b] tokens of slots b."""
        ...

    def hold(self, num_tokens: Int[np.ndarray, " B"]) -> None:
        """Have memory behind the first num_tokens[b] tokens of slots 0..B-1, and none elsewhere."""
        ...

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Make the first tokens of slot `source` those of slot `target`; the source's are of no use afterwards."""
        ...


class WholeMemory:
    """Every slot has its full length from the start. Zeroed once: masked positions must stay finite."""

    def __init__(self, shape: PoolShape, device: torch.device) -> None:
        lead = (shape.num_layers, 2, shape.num_slots, shape.num_kv_heads, round_up(shape.capacity))
        self.cells = torch.zeros(*lead, shape.head_size, dtype=shape.dtype, device=device)

    @property
    def growth_bytes(self) -> int:
        """See `KVMemory.growth_bytes`: slots never grow."""
        return 0

    def bytes_of(self, num_tokens: Int[np.ndarray, " B"]) -> int:
        """See `KVMemory.bytes_of`: full lengths."""
        return self.cells.nbytes // self.cells.shape[2] * len(num_tokens)

    def hold(self, num_tokens: Int[np.ndarray, " B"]) -> None:
        """See `KVMemory.hold`: it is all there."""

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """See `KVMemory.move`: a copy."""
        copy_slot(self.cells, source, target, num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """How a slot lies on pages: `num_runs` stretches, each of all its tokens, page by page."""

    num_runs: int
    token_bytes: int
    "of one token in one run"
    page_bytes: int

    def whole(self, capacity: int) -> int:
        """Round tokens up so that views are few and each run begins on a page."""
        on_pages = self.page_bytes // math.gcd(self.page_bytes, self.token_bytes)
        return round_up(capacity, math.lcm(VIEW_STEP, on_pages))

    def count(self, num_tokens: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Pages of one run that the first tokens reach into."""
        return -(-np.asarray(num_tokens) * self.token_bytes // self.page_bytes)

    def bytes_of(self, num_tokens: Int[np.ndarray, " B"]) -> int:
        """Bytes of all runs' pages, over the slots."""
        return int(self.count(num_tokens).sum()) * self.num_runs * self.page_bytes


def host_pages(num_layers: int, num_kv_heads: int, head_bytes: int) -> Pages:
    """Return how a slot lies on pages of the host: a run for each layer, head, keys and values."""
    return Pages(num_runs=num_layers * 2 * num_kv_heads, token_bytes=head_bytes, page_bytes=mmap.PAGESIZE)


class OnPages:
    """What memory on pages says of bytes."""

    pages: Pages

    @property
    def growth_bytes(self) -> int:
        """See `KVMemory.growth_bytes`."""
        return self.pages.num_runs * self.pages.page_bytes

    def bytes_of(self, num_tokens: Int[np.ndarray, " B"]) -> int:
        """See `KVMemory.bytes_of`."""
        return self.pages.bytes_of(num_tokens)


class PagedHostMemory(OnPages):
    """Pages that the system gives when they are first written and takes back when a sample shrinks or leaves."""

    def __init__(self, shape: PoolShape) -> None:
        size = shape.head_size * shape.dtype.itemsize
        self.pages = host_pages(shape.num_layers, shape.num_kv_heads, size)
        per_slot = self.pages.num_runs
        capacity = self.pages.whole(shape.capacity)
        self._run_bytes = capacity * size
        self._num_slots, self._num_heads = shape.num_slots, shape.num_kv_heads
        self._blocks = shape.num_layers * 2
        num_bytes = shape.num_slots * per_slot * self._run_bytes
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED)
        with contextlib.suppress(OSError):  # a kernel without huge pages does not know the wish
            # a huge page would hold many samples' tokens
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        lead = (shape.num_layers, 2, shape.num_slots, shape.num_kv_heads, capacity)
        self.cells = torch.frombuffer(self._map, dtype=shape.dtype).view(*lead, shape.head_size)
        self._held = self.pages.count(np.full(shape.num_slots, capacity))

    def hold(self, num_tokens: Int[np.ndarray, " B"]) -> None:
        """See `KVMemory.hold`; what is given back reads as zeros."""
        wanted = np.zeros(self._num_slots, dtype=np.int64)
        wanted[: len(num_tokens)] = self.pages.count(num_tokens)
        for slot in np.nonzero(wanted < self._held)[0].tolist():
            self._give_back(slot, int(wanted[slot]) * self.pages.page_bytes)
        self._held = wanted

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """See `KVMemory.move`: a copy."""
        copy_slot(self.cells, source, target, num_tokens)
        self._held[target] = max(self._held[target], self._held[source])

    def _give_back(self, slot: int, start: int) -> None:
        """All bytes from `start` on of each of a slot's runs."""
        runs, length = (1, self._num_heads) if start == 0 else (self._num_heads, 1)
        for block in range(self._blocks):
            first = (block * self._num_slots + slot) * self._num_heads
            for run in range(first, first + runs):
                self._map.madvise(
                    mmap.MADV_DONTNEED, run * self._run_bytes + start, length * self._run_bytes - start
                )
