"""The levels of a chain behind the first, by our own code."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from torch import Tensor

from engine.batch import RunningBatch
from engine.kv import KVPool
from engine.native.attention import SPAN_FIELDS
from engine.native.chain import LEADERS, NativeChain
from engine.native.spans import spans_of
from engine.rule import Leaders, is_native
from engine.runner import ModelRunner


class NativeLevels:
    """Forward and choice of each level are one call (`engine.native.chain`)."""

    def __init__(
        self, chain: NativeChain, batch: RunningBatch, noise: Float[Tensor, "B D V"], pool: KVPool
    ) -> None:
        """Start behind the committed tokens; there is room for a token a level of noise."""
        live = len(batch)
        self._chain, self._noise, self._sampling = chain, noise, batch.sampling
        self._level = 0
        self._spans = spans_of(
            pool,
            slots=np.arange(live),
            counts=np.ones(live, dtype=np.int64),
            starts=batch.lengths[:live] + noise.shape[1] - 1,
        )
        self._starts = self._spans[:, SPAN_FIELDS.index("start")]
        self._starts[:] = batch.lengths[:live] - 1

    @staticmethod
    def of(runner: ModelRunner, batch: RunningBatch, noise: Tensor, logits: Tensor) -> NativeLevels | None:
        """Return the levels behind the first, None where library calls compute them."""
        chain = runner.native_chain
        if chain is None or not is_native(logits, batch.sampling, LEADERS):
            return None
        return NativeLevels(chain, batch, noise, runner.pool)

    def next_level(self, found: Leaders) -> Leaders:
        """Draft behind the best of the leaders."""
        self._level += 1
        self._starts += 1
        ids, scores, logprobs = self._chain.onward(
            found.token_ids[:, 0],
            self._spans,
            self._noise,
            self._level,
            self._sampling.divisor,
            self._sampling.noise_factor,
        )
        return Leaders(token_ids=ids, scores=scores, logprobs=logprobs)
