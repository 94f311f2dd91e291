"""Stands for look-ups while verification is timed: as many tokens as asked for, and none that is likely."""

from __future__ import annotations

import numpy as np

from rlhfspec.core.decode_records import Budget
from rlhfspec.engine.decoding.draft_tree import DraftTree, chain, keep
from rlhfspec.engine.decoding.noise import Noise
from rlhfspec.engine.decoding.running_batch import RunningBatch
from rlhfspec.engine.drafters.cacheless import CachelessDrafter
from rlhfspec.engine.drafters.refinement import Refinement
from rlhfspec.engine.upload import upload


class RandomChains(CachelessDrafter):
    """Drafts tokens that are drawn."""

    def __init__(self, vocab_size: int, *, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def draft(
        self,
        batch: RunningBatch,
        budget: Budget,
        noise: Noise,
        refinement: Refinement | None = None,
    ) -> DraftTree:
        """Return a chain as deep as the budget, of which the refinement keeps what it likes."""
        shape = (len(batch), budget.depth)
        (ids,) = upload([self._random.integers(self._vocab_size, size=shape)], batch.device)
        tree = chain(ids, num_in_cache=0)
        if refinement is None:
            return tree
        refinement.whole_chain(np.full(shape, 0.5, dtype=np.float32))
        return keep(tree, refinement.select())
