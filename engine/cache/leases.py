"""Leases: a transfer thread reads a running sample's caches while the decode thread goes on (design 3.4).

A committed prefix never changes, so reading it needs no copy first. What may change is where it lies: a finished
sample's slot is taken over by the last one. The decode thread moves slots and the transfer thread reads one frame
under the same lock, so neither waits for longer than one frame. On a GPU frames are read on a stream of their own:
what was committed lies there since the decode step that committed it was waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ...core.errors import RlhfSpecError
from .kv_pool import KVPool


class LeaseEnded(RlhfSpecError):
    """The sample has finished, left or been preempted: there is nothing to read any more."""


class CellReader:
    """Copies cells to the host while the decode thread goes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._moved: torch.cuda.Event | None = None

    def after_move(self) -> None:
        """The calling thread's stream has just been told to move cells: later reads come behind that."""
        if self._device.type == "cuda":
            self._moved = torch.cuda.Event()
            self._moved.record(torch.cuda.current_stream(self._device))

    def read(self, cells: Tensor) -> Tensor:
        """Return the cells on the host when they are there; on the CPU, where they lie."""
        if self._device.type != "cuda":
            return cells
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        if self._moved is not None:
            self._stream.wait_event(self._moved)
        staged = torch.empty(cells.shape, dtype=cells.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            staged.copy_(cells, non_blocking=True)
        self._stream.synchronize()
        return staged


class Lease:
    """The right to read the first tokens of a sample's caches, wherever they lie."""

    def __init__(
        self,
        lock: threading.Lock,
        pools: Mapping[str, KVPool],
        readers: Mapping[str, CellReader],
        slot: int,
        copies: Mapping[str, Tensor],
    ) -> None:
        self._lock = lock
        self._pools = pools
        self._readers = readers
        self._copies = copies
        self.slot: int | None = slot
        "None once the sample is gone"

    def read(self, part: str, start: int, stop: int, out: np.ndarray) -> None:
        """Copy a token range of one cache into a byte buffer, uint8 [tokens * token_bytes].

        Raises LeaseEnded when the sample is gone.
        """
        with self._lock:
            if self.slot is None:
                raise LeaseEnded(
                    "the sample whose caches were being read has finished or left, or was preempted"
                )
            pool, copy = self._pools[part], self._copies.get(part)
            if copy is None:
                cells = self._readers[part].read(pool.range_of(self.slot, start, stop))
            else:
                cells = copy[:, :, :, start:stop]
            pool.in_frame(out).copy_(cells)


class Leases:
    """All leases of one engine; `moving` is the decode thread's side of them."""

    def __init__(self, pools: Mapping[str, KVPool]) -> None:
        self._pools = dict(pools)
        self._readers = {part: CellReader(pool.device) for part, pool in pools.items()}
        self._lock = threading.Lock()
        self._given: list[Lease] = []

    def give(self, slot: int, counts: Mapping[str, int]) -> Lease:
        """Lease the committed prefix in a slot, of so many tokens in each cache.

        What other ranks have is asked for at once, and held on the host: they are asked by the decode thread alone.
        """
        copies = {
            part: pool.read(slot, 0, counts[part]).cpu()
            for part, pool in self._pools.items()
            if pool.is_dealt and counts.get(part)
        }
        lease = Lease(self._lock, self._pools, self._readers, slot, copies)
        self._given.append(lease)
        return lease

    def end(self, lease: Lease) -> None:
        """Nothing is read under this lease any more."""
        with self._lock:
            lease.slot = None
        if lease in self._given:
            self._given.remove(lease)

    @contextmanager
    def moving(self, freed: int, last: int) -> Iterator[None]:
        """Hold the readers off while the sample of slot `last` is copied over the freed slot."""
        with self._lock:
            yield
            for reader in self._readers.values():
                reader.after_move()
            for lease in self._given:
                if lease.slot == freed:
                    lease.slot = None
                elif lease.slot == last:
                    lease.slot = freed
        self._given = [lease for lease in self._given if lease.slot is not None]
