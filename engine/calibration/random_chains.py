"""Stands for look-ups while verification is timed: as many tokens as asked for, and none that is likely."""

from __future__ import annotations

import numpy as np

from ...core.decode_records import Budget
from ..decoding.noise import Noise
from ..decoding.running_batch import RunningBatch
from ..drafters.drafter import Drafter
from ..drafters.refinement import Refinement


class RandomChains(Drafter):
    """Drafts tokens that are drawn."""

    def __init__(self, vocab_size: int, *, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def propose(
        self, batch: RunningBatch, budget: Budget, noise: Noise, refinement: Refinement | None = None
    ) -> np.ndarray:
        """Return a chain as deep as the budget."""
        shape = (len(batch), budget.depth)
        if refinement is not None:
            refinement.offer(np.full(shape, 0.5, dtype=np.float32))
        return self._random.integers(self._vocab_size, size=shape)
