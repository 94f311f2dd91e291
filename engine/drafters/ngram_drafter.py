"""Drafts by look-up: the tokens that followed the last n-gram where it stood before, in prompt or response."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from core.decode_records import Budget
from engine.decoding.draft_tree import DEAD, DraftTree
from engine.decoding.noise import Noise
from engine.decoding.running_batch import RunningBatch
from engine.drafters.cacheless import CachelessDrafter, chains
from engine.drafters.refinement import Refinement


class NgramDrafter(CachelessDrafter):
    """Copies a chain from the sample's own past; longest match first, the latest one of that length."""

    def __init__(self, *, ngram_max: int, ngram_min: int) -> None:
        self._sizes = range(ngram_max, ngram_min - 1, -1)

    def draft(
        self,
        batch: RunningBatch,
        budget: Budget,
        noise: Noise,
        refinement: Refinement | None = None,
    ) -> DraftTree | None:
        """Return one chain per sample, dead nodes where there is no match; None when nothing matches."""
        count = min(budget.num_nodes, budget.depth)
        tokens = np.full((len(batch), count), DEAD, dtype=np.int64)
        for slot in range(len(batch)):
            found = self._continuation(batch.tokens[slot, : batch.lengths[slot]], count)
            tokens[slot, : len(found)] = found
        return chains(tokens, batch.device)

    def _continuation(self, tokens: np.ndarray, count: int) -> np.ndarray:
        for size in self._sizes:
            if len(tokens) <= size:
                continue
            windows = sliding_window_view(tokens[:-1], size)
            matches = np.nonzero((windows == tokens[-size:]).all(axis=1))[0]
            if len(matches):
                start = int(matches[-1]) + size
                return tokens[start : start + count]
        return tokens[:0]
