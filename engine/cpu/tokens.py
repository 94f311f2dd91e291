"""Noise and best tokens by our own code, for tensors."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.cpu.program import common_code
from engine.cpu.sampling import leaders_name


def gumbel_rows(words: np.ndarray, ids: Int[Tensor, " V"]) -> Float[Tensor, "B D V"]:
    """Return the noise of every token id.

    Args:
        words: two hash words of each (sample, position), int32 [2, B, D].
        ids: one hash word of each token id, int32; at least LEAST_VOCABULARY.
    """
    first, second = np.ascontiguousarray(words)
    noise = torch.empty(*first.shape, len(ids), dtype=torch.float32)
    common_code().operations["gumbel"](
        noise.data_ptr(), ids.data_ptr(), first.ctypes.data, second.ctypes.data, first.size, len(ids)
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
    address = numbers.ctypes.data
    common_code().operations[leaders_name(count)](
        address,
        ids.data_ptr(),
        address + values.nbytes,
        logits.data_ptr(),
        noise.data_ptr(),
        levels.data_ptr(),
        divisors.data_ptr(),
        factors.data_ptr(),
        *logits.shape,
        logits.stride(0),
        logits.stride(1),
        noise.stride(0),
        noise.stride(1),
        share,
    )
    return ids, values, logprobs
