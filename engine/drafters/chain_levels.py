"""A chain's levels, drafted from one question to the policy to the next: a forward each, or all in one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhfspec.engine.decoding.noise import Noise
from rlhfspec.engine.decoding.running_batch import RunningBatch
from rlhfspec.engine.decoding.sampling_rule import TopK, choose, leaders
from rlhfspec.engine.drafters.refinement import Refinement
from rlhfspec.engine.model.compute_backend import FusedChain

ForwardLevel = Callable[[RunningBatch, Tensor, Tensor | None, Tensor, Tensor | None], Float[Tensor, "B n V"]]
"`LevelDrafter.forward_level`."


class ChainLevels(Protocol):
    """One chain's levels; each is the best child of the one before."""

    def draft(self, begin: int, end: int) -> None:
        """Draft the levels from `begin` on, `end` excluded, and show them to the refinement, if there is one."""
        ...

    def token_ids(self, count: int) -> Int[Tensor, "B count"]:
        """Return the first levels' tokens."""
        ...


class LevelByLevel:
    """A forward for each level."""

    def __init__(
        self,
        forward: ForwardLevel,
        batch: RunningBatch,
        noise: Noise,
        logits: Float[Tensor, "B V"],
        refinement: Refinement | None,
        depth: int,
    ) -> None:
        self._forward = forward
        self._batch = batch
        self._noise = noise
        self._logits = logits
        self._refinement = refinement
        self._index = torch.arange(depth, device=logits.device).expand(len(batch), -1)
        self._tokens: list[Tensor] = []

    def draft(self, begin: int, end: int) -> None:
        """See `ChainLevels`."""
        found = [self._next() for _ in range(begin, end)]
        if self._refinement is not None:
            self._refinement.chain_levels(
                np.concatenate([each.scores for each in found if each is not None], 1),
                np.concatenate([each.logprobs for each in found if each is not None], 1),
            )

    def token_ids(self, count: int) -> Int[Tensor, "B count"]:
        """See `ChainLevels`."""
        return torch.cat(self._tokens[:count], dim=1)

    def _next(self) -> TopK | None:
        """Draft a level; return its leaders where they are to be scored."""
        batch, drafted = self._batch, len(self._tokens)
        if drafted:
            last, index = self._tokens[-1], self._index[:, :drafted]
            self._logits = self._forward(batch, last, None, index, None)[:, 0]
        level = noise_at_level(len(batch), 1, drafted, self._logits.device)
        logits = self._logits[:, None]
        if self._refinement is None:
            self._tokens.append(choose(logits, self._noise, level, batch.sampling))
            return None
        found = leaders(logits, self._noise, level, batch.sampling, min(2, logits.shape[-1]))
        self._tokens.append(found.token_ids[..., 0])
        return found


class FusedLevels:
    """The same in one call for all levels between two questions."""

    def __init__(
        self,
        fused: FusedChain,
        batch: RunningBatch,
        noise: Noise,
        logits: Float[Tensor, "B V"],
        refinement: Refinement | None,
    ) -> None:
        self._fused = fused
        self._refinement = refinement
        sampling = batch.sampling
        lengths = batch.lengths[: len(batch)]
        self._noise = noise
        fused.start(logits, lengths, noise.buffer, sampling.divisor, sampling.noise_factor)

    def draft(self, begin: int, end: int) -> None:
        """See `ChainLevels`."""
        self._noise.up_to(end)
        scores, logprobs = self._fused.draft(begin, end)
        if self._refinement is not None:
            self._refinement.chain_levels(scores, logprobs)

    def token_ids(self, count: int) -> Int[Tensor, "B count"]:
        """See `ChainLevels`."""
        return self._fused.token_ids(count)


@lru_cache(maxsize=1024)
def noise_at_level(batch: int, width: int, level: int, device: torch.device) -> Int[Tensor, "B w"]:
    """The level of noise that a level's nodes choose by; made once."""
    return torch.full((batch, width), level, device=device)
