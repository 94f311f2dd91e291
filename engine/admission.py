"""How many samples the caches have room for, when memory comes with their length (design 3.7).

A sample may grow to its limit, and few do: to keep full lengths for all would leave most of the memory empty. So
samples are let in by what they are now, and when those that run outgrow the room, the shortest is preempted: its caches
go, its tokens stay, and it is resumed when there is room. It costs least to compute again, and the long ones, which
everybody waits for, go on. One sample of any length has room by itself, so there is always one that goes on.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from jaxtyping import Int

from ..core.errors import ConfigError
from .cache.kept_caches import KeptCaches
from .cache.kv_pool import KVPool
from .decoding.running_batch import RunningBatch

MB = 10**6


def require_room_for_one(max_bytes: int, *, needed: int, num_tokens: int) -> None:
    """Raise ConfigError when a sample of full length, `num_tokens` and so many bytes, would never find room."""
    if needed > max_bytes:
        raise ConfigError(
            f"engine.kv_cache_mb: {max_bytes / MB:.1f} MB have no room for one sample of {num_tokens} tokens, which "
            f"takes {needed / MB:.1f} MB; raise it, or lower data.max_prompt_tokens or sampling.max_new_tokens"
        )


class KVAdmission:
    """The running samples' share of a number of bytes, over all caches. Without a number everything has room."""

    def __init__(self, batch: RunningBatch, pools: Collection[KVPool], *, max_bytes: int | None) -> None:
        """Set out. Raises ConfigError when one sample of full length has no room."""
        self._batch = batch
        self._pools = tuple(pools)
        self._max_bytes = max_bytes
        self.kept: KeptCaches | None = None
        "caches of samples that do not run, in the same memory: they yield to those that do"
        if max_bytes is None:
            return
        longest = batch.tokens.shape[1]
        require_room_for_one(max_bytes, needed=self._bytes_of(np.array([longest])), num_tokens=longest)
        self.hold()

    @property
    def free_bytes(self) -> int | None:
        """Bytes that no running sample has; None where there is no limit."""
        return None if self._max_bytes is None else self._max_bytes - self._bytes_of(self._lengths)

    @property
    def num_slots(self) -> int:
        """Slots that can be used now, if those who come are like those who run."""
        return min(self._pools[0].num_slots, len(self._batch) + self.num_more())

    def num_of(self, num_tokens: int) -> int:
        """How many samples of so many tokens are let in together; at least one."""
        slots = self._pools[0].num_slots
        if self._max_bytes is None:
            return slots
        each = self._bytes_of(np.array([num_tokens])) + self._growth_bytes
        return min(slots, max(1, self._max_bytes // each))

    def num_more(self) -> int:
        """How many more samples have room, if they are like those that run; full lengths while none does."""
        free = self.free_bytes
        if free is None:
            return self._pools[0].num_slots
        running = self._lengths
        usual = int(running.mean()) if len(running) else self._batch.tokens.shape[1]
        return max(free, 0) // self._bytes_of(np.array([usual]))

    def admits(self, num_tokens: int) -> bool:
        """Whether a sample of so many committed tokens may come in, such that each one can grow by a page."""
        free = self.free_bytes
        if free is None or not len(self._batch):
            return True
        growth = (len(self._batch) + 1) * self._growth_bytes
        return self._bytes_of(np.array([num_tokens])) + growth <= free

    def one_too_many(self) -> int | None:
        """The slot to be vacated for the others to go on; None when all have room."""
        free = self.free_bytes
        return None if free is None or free >= 0 else int(self._lengths.argmin())

    def hold(self) -> None:
        """Have memory behind what the next decode step may write, and none behind what has left."""
        if self._max_bytes is not None:
            for pool in self._pools:
                pool.memory.hold(pool.extents(self._lengths))
            if self.kept is not None:
                self.kept.shrink_to(max(self._max_bytes - self._bytes_of(self._lengths), 0))

    @property
    def _growth_bytes(self) -> int:
        """Bytes by which a sample grows at once."""
        return sum(pool.memory.growth_bytes for pool in self._pools)

    @property
    def _lengths(self) -> Int[np.ndarray, " B"]:
        return self._batch.lengths[: len(self._batch)]

    def _bytes_of(self, lengths: Int[np.ndarray, " B"]) -> int:
        return sum(pool.memory.bytes_of(pool.extents(lengths)) for pool in self._pools)
