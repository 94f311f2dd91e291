"""Drafts by look-up: the tokens that followed the last n-gram where it stood before, in prompt or response."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from engine.decoding.running_batch import RunningBatch
from engine.drafters.lookup_drafter import Found, LookupDrafter


class NgramDrafter(LookupDrafter):
    """Copies a chain from the sample's own past; longest match first, the latest one of that length."""

    def __init__(self, *, ngram_max: int, ngram_min: int) -> None:
        super().__init__()
        self._sizes = range(ngram_max, ngram_min - 1, -1)

    def look_up(self, slot: int, batch: RunningBatch, count: int) -> Found:
        """See `LookupDrafter`; how often it went on like this is not counted."""
        tokens = batch.tokens[slot, : batch.lengths[slot]]
        for size in self._sizes:
            if len(tokens) <= size:
                continue
            windows = sliding_window_view(tokens[:-1], size)
            matches = np.nonzero((windows == tokens[-size:]).all(axis=1))[0]
            if len(matches):
                start = int(matches[-1]) + size
                ids = tokens[start : start + count].tolist()
                return Found(ids, list(range(size, size + len(ids))), [1.0] * len(ids))
        return Found([], [], [])
