"""Gumbel noise that is a pure function of (sample key, position, token id) (design 3.1).

An integer hash of the three gives 32 bits `k`; with `w = (k + 0.5) / 2^32` the noise is
`g = -log(-log1p(-w))`. In this form float32 resolves the upper tail, where the maximum lives; the usual
`-log(-log(u))` in float32 yields infinities at large vocabularies. The hash works on int32 with wrap-around,
so CPU and CUDA agree on every bit of `k`, and a wider vocabulary leaves the narrower one's noise unchanged.

Hash: each key and position give two words by splitmix64 and lowbias32 (C. Wellons, "Hash function prospector");
the token's word is added, mixed, and mixed again with the second word, so that rows do not share a noise vector
when one word collides.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from core.records import SampleKey, Stream

MASK64 = (1 << 64) - 1
STREAM_IDS = {Stream.TRAIN: 1, Stream.EVAL: 2, Stream.BENCH: 3}
LARGEST_W = 1.0 - 2.0**-24


def key_words(key: SampleKey) -> np.ndarray:
    """Return the key's two hash words, int32 [2]."""
    state = 0
    for part in (key.run_seed, STREAM_IDS[key.stream], key.sample_index):
        state = _splitmix64(state ^ (part & MASK64))
    return np.array([state & 0xFFFFFFFF, state >> 32], dtype=np.uint32).view(np.int32)


def gumbel_noise(
    words: Int[Tensor, "B 2"], positions: Int[Tensor, "B D"], vocab_size: int
) -> Float[Tensor, "B D V"]:
    """Return the noise of every token id at the given absolute positions.

    Args:
        words: key words of each sample, int32.
        positions: index, in the unpadded conversation, of the token to be sampled.
        vocab_size: V; the noise of an id does not depend on it.
    """
    return gumbel_from_bits(noise_bits(words, positions, vocab_size))


def noise_bits(
    words: Int[Tensor, "B 2"], positions: Int[Tensor, "B D"], vocab_size: int
) -> Int[Tensor, "B D V"]:
    """Return the 32 hash bits of every (sample, position, token id), as int32."""
    at = positions.to(torch.int32)
    first = _mix32(words[:, :1] ^ _mix32(at * _i32(0x9E3779B9) + _i32(0x3C6EF372)))
    second = _mix32(words[:, 1:] + _mix32(at * _i32(0x85EBCA6B) ^ _i32(0x27D4EB2F)))
    ids = torch.arange(vocab_size, dtype=torch.int32, device=words.device)
    bits = _mix32(ids * _i32(0x9E3779B1)) + first[..., None]
    bits = _mix32_(bits)
    bits ^= second[..., None]
    return _mix32_(bits)


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """Map 32 hash bits to standard Gumbel noise, float32, finite, between -2.9 and 22.9."""
    high = ((bits >> 16) & 0xFFFF).to(torch.float32)
    w = (bits & 0xFFFF).to(torch.float32).add_(0.5).mul_(2.0**-32)
    w.add_(high, alpha=2.0**-16).clamp_(max=LARGEST_W)
    return w.neg_().log1p_().neg_().log_().neg_()


def _splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK64
    return state ^ (state >> 31)


def _mix32(x: Tensor) -> Tensor:
    return _mix32_(x.clone())


def _mix32_(x: Tensor) -> Tensor:
    """Mix in place: lowbias32, two multiplications, three logical shifts."""
    x ^= (x >> 16) & 0xFFFF
    x *= _i32(0x7FEB352D)
    x ^= (x >> 15) & 0x1FFFF
    x *= _i32(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x


def _i32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
