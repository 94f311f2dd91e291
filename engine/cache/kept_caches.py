"""Caches of samples that wait for their environment: copies in the host's memory, the oldest given up first.

A turn ends, its slot goes to another sample, and the next turn finds its past here instead of computing it again. What
is not here is computed: with the same bits where numerics are invariant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from ...core.records import SampleKey


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePiece:
    """A token range of one cache as bytes: cells [L, 2, H, T, E] behind one another."""

    part: str
    "`target` or `draft`"
    start: int
    stop: int
    cells: np.ndarray
    "uint8"


@dataclass(frozen=True, slots=True)
class _Kept:
    token_ids: np.ndarray
    pieces: tuple[CachePiece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.cells.nbytes for piece in self.pieces)


class KeptCaches:
    """By sample, whichever turn ended; at most `max_bytes` in all."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[SampleKey, _Kept] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes could be kept, others given up for them."""
        return 0 < num_bytes <= self._max_bytes

    def put(self, key: SampleKey, token_ids: Int[np.ndarray, " T"], pieces: Sequence[CachePiece]) -> None:
        """Keep the caches of a sample's first T tokens; older ones go where the room is short."""
        self._drop(key.sample)
        kept = _Kept(token_ids, tuple(pieces))
        self.shrink_to(self._max_bytes - kept.num_bytes)
        self._kept[key.sample] = kept
        self.num_bytes += kept.num_bytes

    def take(self, key: SampleKey, token_ids: Int[np.ndarray, " T"]) -> tuple[CachePiece, ...]:
        """Hand out what is kept of a sample, if `token_ids` begin with the tokens it belongs to."""
        kept = self._kept.get(key.sample)
        if kept is None:
            return ()
        self._drop(key.sample)
        is_past = np.array_equal(kept.token_ids, token_ids[: len(kept.token_ids)])
        return kept.pieces if is_past else ()

    def forget(self, key: SampleKey) -> None:
        """Drop what is kept of a sample, if anything is."""
        self._drop(key.sample)

    def clear(self) -> None:
        """Drop all: other weights have made it."""
        self._kept.clear()
        self.num_bytes = 0

    def shrink_to(self, num_bytes: int) -> None:
        """Give the oldest up until at most so many bytes are left."""
        while self._kept and self.num_bytes > num_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: SampleKey) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.num_bytes -= kept.num_bytes
