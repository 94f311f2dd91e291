"""Drafts by look-up: the tokens that followed the last n-gram where it stood before, in prompt or response."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from core.decode_records import Budget
from engine.decoding.draft_tree import DEAD, DraftTree, chain
from engine.decoding.noise import Noise
from engine.decoding.running_batch import RunningBatch
from engine.decoding.verify import Verdict
from engine.drafters.refinement import Refinement
from engine.upload import upload


class NgramDrafter:
    """Copies a chain from the sample's own past; longest match first, the latest one of that length."""

    def __init__(self, *, ngram_max: int, ngram_min: int) -> None:
        self._sizes = range(ngram_max, ngram_min - 1, -1)

    def admit(self, slots: range, batch: RunningBatch) -> None:
        """Nothing to prepare: the past is in the batch."""

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
        longest = int((tokens != DEAD).sum(1).max(initial=0))
        if longest == 0:
            return None
        (ids,) = upload([tokens[:, :longest]], batch.device)
        return chain(ids, (ids != DEAD).float())

    def commit(self, batch: RunningBatch, tree: DraftTree, verdict: Verdict) -> None:
        """Nothing is cached."""

    def note_kept(self, batch: RunningBatch, num_kept: np.ndarray) -> None:
        """Nothing is cached."""

    def move_slot(self, source: int, target: int) -> None:
        """Nothing is cached."""

    def drop(self) -> None:
        """Nothing is cached."""

    @property
    def cache(self) -> None:
        """Nothing is cached: another instance finds the past in the tokens."""
        return None

    def num_cached_tokens(self, slot: int) -> int:
        """Nothing is cached."""
        return 0

    def adopt(self, slot: int, num_tokens: int) -> None:
        """Nothing to take over."""

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
