"""Drafts what is on record: a sample that was generated before is regenerated at the speed of a prefill.

As every drafter it can change no token: where the record is wrong, the target's own token is emitted. Of an honest
record all is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...core.decode_records import Budget
from ...core.records import SampleKey
from ..decoding.draft_tree import DEAD, DraftTree
from ..decoding.noise import Noise
from ..decoding.running_batch import RunningBatch
from .drafter import Drafter, chains
from .refinement import Refinement


class RecordDrafter(Drafter):
    """Drafts the recorded response at the same position, for samples that have one."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size`: ids outside it are no tokens, whatever a record says."""
        self._vocab_size = vocab_size
        self.responses: Mapping[SampleKey, np.ndarray] = {}
        "whole responses, int64 [T] each, by the key of the sample"

    def propose(
        self, batch: RunningBatch, budget: Budget, noise: Noise, refinement: Refinement | None = None
    ) -> DraftTree | None:
        """Return what follows on record as one chain per sample; None when nothing does."""
        count = min(budget.num_nodes, budget.depth)
        tokens = np.full((len(batch), count), DEAD, dtype=np.int64)
        for slot, request in enumerate(batch.requests):
            response = self.responses.get(request.key.sample)
            if response is not None:
                begin = int(batch.lengths[slot] - batch.prompt_lengths[slot])
                following = response[begin : begin + count]
                tokens[slot, : len(following)] = following
        # what is behind an id that is no token could never be accepted
        is_token = ((tokens >= 0) & (tokens < self._vocab_size)).cumprod(axis=1, dtype=bool)
        num_kept = is_token.sum(axis=1)
        longest = int(num_kept.max())
        if not longest:
            return None
        tree = chains(np.where(is_token, tokens, DEAD)[:, :longest], batch)
        return tree if int(num_kept.min()) == longest else replace(tree, num_kept=num_kept)
