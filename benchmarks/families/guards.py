"""Finds writes outside the engine's own memory: guard pages around the KV pool, canaries around its buffers.

A touch of a guard page ends the process by a signal.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

import rlhfspec.engine.cache.kv_pool
from rlhfspec.engine.cache.kv_memory import PoolShape, WholeMemory, round_up

CANARY = 0xA5
MARGIN_BYTES = 512
MOST_BUFFERS = 512
"Watched before they are looked at."
_GUARD_BYTES = 1 << 28
"On each side; addresses only. A layer of another shape than the pool's reaches far."
_PROT_NONE = 0
_UNRESERVED = getattr(mmap, "MAP_NORESERVE", 0x4000)
_libc = ctypes.CDLL(None, use_errno=True)


class CorruptionError(Exception):
    """Memory was written that nobody owns."""


class GuardedMemory(WholeMemory):
    """A pool's cells that end where a page begins that nobody may touch; another such page lies before them."""

    def __init__(self, shape: PoolShape, device: torch.device) -> None:
        lead = (shape.num_layers, 2, shape.num_slots, shape.num_kv_heads, round_up(shape.capacity))
        sizes = torch.Size((*lead, shape.head_size))
        num_bytes = sizes.numel() * shape.dtype.itemsize
        guard, inner = _GUARD_BYTES, round_up(num_bytes, mmap.PAGESIZE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED
        self._map = mmap.mmap(-1, inner + 2 * guard, flags=flags)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for place in (start, start + guard + inner):
            if _libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(guard), _PROT_NONE) != 0:
                raise OSError(ctypes.get_errno(), "mprotect refused a guard page")
        owned = torch.frombuffer(self._map, dtype=torch.uint8, offset=guard, count=inner)
        self._slack, cells = owned[: inner - num_bytes], owned[inner - num_bytes :]
        self._slack.fill_(CANARY)
        self.cells = cells.view(shape.dtype).view(sizes)

    def is_intact(self) -> bool:
        """Whether nothing was written between the guard page and the first cell."""
        return bool((self._slack == CANARY).all())


class Guards:
    """While entered, watches the pools and buffers that the engine makes in this process."""

    def __init__(self) -> None:
        self._pools: list[GuardedMemory] = []
        self._buffers: list[Tensor] = []
        self._usual: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        self._replace(rlhfspec.engine.cache.kv_pool, "WholeMemory", self._pool)
        for name in ("new_empty", "new_zeros"):
            self._replace(torch.Tensor, name, self._watched(getattr(torch.Tensor, name), name == "new_zeros"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for place, name, usual in self._usual:
            setattr(place, name, usual)

    def require_intact(self) -> None:
        """Raise CorruptionError when anything was written beside a pool or a buffer; forget the buffers."""
        buffers, self._buffers = self._buffers, []
        for flat in buffers:
            if not ((flat[:MARGIN_BYTES] == CANARY).all() and (flat[-MARGIN_BYTES:] == CANARY).all()):
                raise CorruptionError("something was written beside a buffer of the engine")
        if not all(pool.is_intact() for pool in self._pools):
            raise CorruptionError("something was written before the first cell of a KV pool")

    def _replace(self, place: Any, name: str, made: Any) -> None:
        self._usual.append((place, name, getattr(place, name)))
        setattr(place, name, made)

    def _pool(self, shape: PoolShape, device: torch.device) -> GuardedMemory:
        self._pools.append(GuardedMemory(shape, device))
        return self._pools[-1]

    def _watched(self, usual: Callable[..., Tensor], zeros: bool) -> Callable[..., Tensor]:
        """Return another way to make a tensor: where the engine calls it, with canaries on both sides."""

        def make(like: Tensor, *size: Any, **options: Any) -> Tensor:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            made = usual(like, *size, **options)
            if not caller.startswith("engine.") or made.numel() == 0:
                return made
            flat = torch.full((made.nbytes + 2 * MARGIN_BYTES,), CANARY, dtype=torch.uint8)
            self._buffers.append(flat)
            if len(self._buffers) > MOST_BUFFERS:
                self.require_intact()
                self._buffers.append(flat)
            inner = flat[MARGIN_BYTES:-MARGIN_BYTES].view(made.dtype).view(made.shape)
            return inner.zero_() if zeros else inner

        return make
