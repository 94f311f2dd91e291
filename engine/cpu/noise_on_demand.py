"""Noise of a large vocabulary, row by row as decoding looks at it: most of what a plan might draft never is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..decoding.noise import Noise, NoiseSource, id_words, values_of_levels
from .sampling import LEAST_VOCABULARY
from .tokens import CpuNoise, gumbel_rows


class NoiseOnDemand(CpuNoise):
    """The noise of (sample, level) is made when a choice first needs it."""

    def __init__(self, words: Int[np.ndarray, "2 B D"], ids: Int[Tensor, " V"]) -> None:
        """Make nothing yet.

        Args:
            words: two hash words of each (sample, position), int32.
            ids: one hash word of each token id, int32; at least LEAST_VOCABULARY.
        """
        _, samples, levels = words.shape
        # level by level: what is asked for at once lies in one piece
        self._rows = torch.empty(levels, samples, len(ids), dtype=torch.float32)
        self._words, self._ids = words, ids
        self._flat_words = words.swapaxes(1, 2).reshape(2, -1)
        self._is_made = np.zeros((levels, samples), dtype=np.bool_)

    @property
    def buffer(self) -> Float[Tensor, "B D V"]:
        """See `Noise`."""
        return self._rows.transpose(0, 1)

    @property
    def values(self) -> Float[Tensor, "B D V"]:
        """All of it."""
        return self.up_to(self._words.shape[2])

    def up_to(self, levels: int) -> Float[Tensor, "B d V"]:
        """See `Noise`."""
        wanted = np.zeros_like(self._is_made)
        wanted[:levels] = True
        self._make(wanted)
        return self.buffer[:, :levels]

    def of_levels(self, levels: Int[Tensor, "B R"]) -> Float[Tensor, "B R V"]:
        """See `Noise`; no other rows are made."""
        self._make_levels(levels)
        return values_of_levels(self.buffer, levels)

    def __getitem__(self, index: Any) -> CpuNoise:
        """See `Noise`."""
        return CpuNoise(self.values[index])

    def of_ids(self, ids: Int[Tensor, " W"]) -> NoiseOnDemand:
        """See `Noise`; what is left out is never made."""
        return NoiseOnDemand(self._words, self._ids[ids])

    def leaders(
        self,
        logits: Tensor,
        levels: Tensor,
        divisors: Tensor,
        factors: Tensor,
        *,
        count: int,
        share: float,
    ) -> tuple[Tensor, np.ndarray, np.ndarray] | None:
        """See `Noise.leaders`."""
        self._make_levels(levels)
        return super().leaders(logits, levels, divisors, factors, count=count, share=share)

    def _make_levels(self, levels: Int[Tensor, "B R"]) -> None:
        wanted = np.zeros_like(self._is_made)
        wanted[levels.numpy(), np.arange(len(levels))[:, None]] = True
        self._make(wanted)

    def _make(self, wanted: Bool[np.ndarray, "D B"]) -> None:
        missing = np.flatnonzero(wanted & ~self._is_made)
        if not len(missing):
            return
        rows = self._rows.flatten(0, 1)
        for run in np.split(missing, np.flatnonzero(np.diff(missing) != 1) + 1):
            first, end = int(run[0]), int(run[-1]) + 1
            gumbel_rows(self._flat_words[:, None, first:end], self._ids, out=rows[None, first:end])
        self._is_made |= wanted


class CpuNoiseSource(NoiseSource):
    """Makes noise when it is looked at, a row in one pass."""

    def of_words(self, words: Int[Tensor, "2 B D"], vocab_size: int) -> Noise:
        """See `NoiseSource`."""
        if vocab_size < LEAST_VOCABULARY:
            return super().of_words(words, vocab_size)
        return NoiseOnDemand(words.numpy(), id_words(vocab_size, self.device))
