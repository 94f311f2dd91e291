"""Noise and best tokens by our own code (`engine.cpu.sampling`), for tensors."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..decoding.noise import Noise
from .program import common_code
from .sampling import MOST_LEADERS, leaders_name


class CpuNoise(Noise):
    """Noise as values, and choices by it in one pass over the logits."""

    def choose(self, logits: Tensor, levels: Tensor, divisors: Tensor, factors: Tensor) -> Tensor | None:
        """See `Noise.choose`."""
        found = self.leaders(logits, levels, divisors, factors, count=1, share=0.0)
        return None if found is None else found[0][..., 0]

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
        """See `Noise.leaders`; more than MOST_LEADERS, or logits of another type than float32, are the library's."""
        if count > MOST_LEADERS or logits.dtype != torch.float32 or logits.stride(-1) != 1:
            return None
        return best_tokens(logits, self.buffer, levels, divisors, factors, count=count, share=share)


def gumbel_rows(
    words: np.ndarray, ids: Int[Tensor, " V"], out: Float[Tensor, "B D V"] | None = None
) -> Float[Tensor, "B D V"]:
    """Return the noise of every token id.

    Args:
        words: two hash words of each (sample, position), int32 [2, B, D].
        ids: one hash word of each token id, int32; at least LEAST_VOCABULARY.
        out: where to write it, in one piece; made anew by default.
    """
    first, second = np.ascontiguousarray(words)
    noise = torch.empty(*first.shape, len(ids), dtype=torch.float32) if out is None else out
    common_code().operations["gumbel"](
        out=noise.data_ptr(),
        ids=ids.data_ptr(),
        first=first.ctypes.data,
        second=second.ctypes.data,
        rows=first.size,
        vocabulary=len(ids),
    )
    return noise


def best_tokens(
    logits: Float[Tensor, "B R V"],
    noise: Float[Tensor, "B D V"],
    levels: Int[Tensor, "B R"],
    divisors: Float[Tensor, " B"],
    factors: Float[Tensor, " B"],
    *,
    count: int,
    share: float,
) -> tuple[Int[Tensor, "B R k"], np.ndarray, np.ndarray]:
    """Return the `count` best token ids of logits / divisor + factor * noise, their values, their log-probabilities.

    The last are under softmax(logits / divisor + share * factor * noise), and not written with a count of 1. Arguments
    are float32 on the CPU, int64 for levels; rows of logits and noise lie anywhere, each in one piece.
    """
    shape = (*logits.shape[:2], count)
    numbers, ids = np.empty((2, *shape), dtype=np.float32), torch.empty(shape, dtype=torch.int64)
    values, logprobs = numbers
    levels = levels.contiguous()
    samples, nodes, vocabulary = logits.shape
    common_code().operations[leaders_name(count)](
        best=values.ctypes.data,
        ids=ids.data_ptr(),
        logprobs=logprobs.ctypes.data,
        logits=logits.data_ptr(),
        noise=noise.data_ptr(),
        levels=levels.data_ptr(),
        divisors=divisors.data_ptr(),
        factors=factors.data_ptr(),
        samples=samples,
        nodes=nodes,
        vocabulary=vocabulary,
        sample_stride=logits.stride(0),
        node_stride=logits.stride(1),
        noise_stride=noise.stride(0),
        level_stride=noise.stride(1),
        share=share,
    )
    return ids, values, logprobs
