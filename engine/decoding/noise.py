"""Gumbel noise that is a pure function of (sample key, prompt, position, token id) (design 3.1).

An integer hash of the four gives 32 bits `k`; with `w = (k + 0.5) / 2^32` the noise is
`g = -log(-log1p(-w))`. In this form float32 resolves the upper tail, where the maximum lives; the usual
`-log(-log(u))` in float32 yields infinities at large vocabularies. The hash works on int32 with wrap-around,
so CPU and CUDA agree on every bit of `k`, and a wider vocabulary leaves the narrower one's noise unchanged.

Hash: each key, prompt and position give two words by splitmix64 and lowbias32 (C. Wellons, "Hash function prospector");
the token's word is added, mixed, and mixed again with the second word, so that rows do not share a noise vector
when one word collides.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from ...core.records import SampleKey, Stream
from ..triton_here import can_run_triton
from ..upload import upload

MASK64 = (1 << 64) - 1
STREAM_IDS = {Stream.TRAIN: 1, Stream.EVAL: 2, Stream.BENCH: 3}
LARGEST_W = 1.0 - 2.0**-24
# what makes a position's first word, by a sum, and its second, by an exclusive or
FIRST_FACTOR, FIRST_TERM = 0x9E3779B9, 0x3C6EF372
SECOND_FACTOR, SECOND_MASK = 0x85EBCA6B, 0x27D4EB2F


def key_words(key: SampleKey, prompt: Integer[np.ndarray, " T"]) -> np.ndarray:
    """Return the two hash words of a key and the token ids of its prompt, int32 [2]."""
    digest = hashlib.blake2b(np.ascontiguousarray(prompt, dtype="<i8").tobytes(), digest_size=8).digest()
    state = 0
    for part in (key.run_seed, STREAM_IDS[key.stream], key.sample_index, int.from_bytes(digest, "little")):
        state = _splitmix64(state ^ (int(part) & MASK64))
    return np.array([state & 0xFFFFFFFF, state >> 32], dtype=np.uint32).view(np.int32)


class Noise:
    """Noise of the next positions of every sample, as values [B, D, V]."""

    words: Int[Tensor, "2 B D"] | None = None
    "what kernels make it of, where they do: two hash words of each (sample, position), int32, on the device"

    def __init__(self, values: Float[Tensor, "B D V"]) -> None:
        self._values = values

    @property
    def values(self) -> Float[Tensor, "B D V"]:
        """All of it."""
        return self._values

    @property
    def buffer(self) -> Float[Tensor, "B D V"]:
        """Where the values lie, or will once they are asked for."""
        return self.values

    def up_to(self, levels: int) -> Float[Tensor, "B d V"]:
        """Return the first levels' values; they then lie in `buffer`."""
        return self.values[:, :levels]

    def of_levels(self, levels: Int[Tensor, "B R"]) -> Float[Tensor, "B R V"]:
        """Return each row's values: its sample's of its level."""
        return values_of_levels(self.values, levels)

    def of_ids(self, ids: Int[Tensor, " W"]) -> Noise:
        """Return that of some token ids, in their order."""
        return self[..., ids]

    def __getitem__(self, index: Any) -> Noise:
        """Return a part, indexed as `values`."""
        return type(self)(self.values[index])

    def choose(
        self,
        logits: Float[Tensor, "B R V"],
        levels: Int[Tensor, "B R"],
        divisors: Float[Tensor, " B"],
        factors: Float[Tensor, " B"],
    ) -> Int[Tensor, "B R"] | None:
        """Return the argmax of logits / divisor + factor * noise of every row, by the noise of its level.

        None: no faster way is known than to look at all values.
        """
        return None

    def leaders(
        self,
        logits: Float[Tensor, "B R V"],
        levels: Int[Tensor, "B R"],
        divisors: Float[Tensor, " B"],
        factors: Float[Tensor, " B"],
        *,
        count: int,
        share: float,
    ) -> tuple[Int[Tensor, "B R k"], np.ndarray, np.ndarray] | None:
        """Return the `count` best tokens by the same scores, their scores and their log-probabilities.

        The last are under softmax(logits / divisor + share * factor * noise). None: as of `choose`.
        """
        return None


def values_of_levels(values: Float[Tensor, "B D V"], levels: Int[Tensor, "B R"]) -> Float[Tensor, "B R V"]:
    """Return each row's values: its sample's of its level."""
    return values.gather(1, levels[..., None].expand(-1, -1, values.shape[-1]))


class HashedNoise(Noise):
    """Noise of a GPU's rows that lies nowhere: a choice computes what it needs of it (`fused_choice`)."""

    def __init__(self, words: Int[Tensor, "2 B D"], vocab_size: int) -> None:
        """`words`: see `Noise`."""
        self.words = self._words = words
        self._vocab_size = vocab_size
        self._made: Tensor | None = None

    @property
    def values(self) -> Float[Tensor, "B D V"]:
        """All of it, for who looks at more than the best token."""
        from .noise_cuda import fused_gumbel

        if self._made is None:
            self._made = fused_gumbel(self._words, self._vocab_size)
        return self._made

    def __getitem__(self, index: Any) -> Noise:
        """See `Noise`."""
        return Noise(self.values[index])

    def choose(self, logits: Tensor, levels: Tensor, divisors: Tensor, factors: Tensor) -> Tensor:
        """See `Noise.choose`."""
        from .noise_cuda import fused_choice

        return fused_choice(logits, self._words, levels, divisors, factors)


class NoiseSource:
    """Makes noise by library calls."""

    ahead = True
    "worth making for several decode steps at once"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, words: np.ndarray, positions: np.ndarray, vocab_size: int) -> Noise:
        """Return the noise of every token id at the given absolute positions; arguments as of `gumbel_noise`."""
        (on_device,) = upload([row_words(words, positions)], self.device)
        return self.of_words(on_device, vocab_size)

    def of_words(self, words: Int[Tensor, "2 B D"], vocab_size: int) -> Noise:
        """Return the noise of positions whose hash words lie on the device (`row_words`)."""
        return Noise(gumbel_from_bits(bits_of_words(words, vocab_size)))


class HashedNoiseSource(NoiseSource):
    """Where one kernel computes hash, noise and choice."""

    ahead = False

    def of_words(self, words: Int[Tensor, "2 B D"], vocab_size: int) -> Noise:
        """See `NoiseSource`; nothing is computed yet."""
        return HashedNoise(words, vocab_size)


def noise_source(device: torch.device) -> NoiseSource:
    """Return what makes noise on a device without code of our own for it."""
    return HashedNoiseSource(device) if can_run_triton(device) else NoiseSource(device)


def gumbel_noise(words: np.ndarray, positions: np.ndarray, vocab_size: int) -> Float[Tensor, "B D V"]:
    """Return the noise of every token id at the given absolute positions, by library calls on the host.

    Args:
        words: key words of each sample, int32 [B, 2].
        positions: index, in the unpadded conversation, of the token to be sampled, [B, D].
        vocab_size: V; the noise of an id does not depend on it.
    """
    return gumbel_from_bits(noise_bits(words, positions, vocab_size))


def noise_bits(words: np.ndarray, positions: np.ndarray, vocab_size: int) -> Int[Tensor, "B D V"]:
    """Return the 32 hash bits of every (sample, position, token id), as int32."""
    return bits_of_words(torch.from_numpy(row_words(words, positions)), vocab_size)


def bits_of_words(words: Int[Tensor, "2 B D"], vocab_size: int) -> Int[Tensor, "B D V"]:
    """Return the same from each (sample, position)'s two words."""
    first, second = words
    bits = id_words(vocab_size, words.device) + first[..., None]
    bits = _mix32_(bits)
    bits ^= second[..., None]
    return _mix32_(bits)


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """Map 32 hash bits to standard Gumbel noise, float32, finite, between -2.9 and 22.9."""
    high = ((bits >> 16) & 0xFFFF).to(torch.float32)
    w = (bits & 0xFFFF).to(torch.float32).add_(0.5).mul_(2.0**-32)
    w.add_(high, alpha=2.0**-16).clamp_(max=LARGEST_W)
    return w.neg_().log1p_().neg_().log_().neg_()


def row_words(words: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Two words for each (sample, position), int32 [2, B, D], hashed on the host: they are few."""
    at = positions.astype(np.uint32)
    mixed = _mix32_host(np.stack([at * FIRST_FACTOR + FIRST_TERM, at * SECOND_FACTOR ^ SECOND_MASK]))
    key = words.view(np.uint32).T[:, :, None]
    return _mix32_host(np.stack([key[0] ^ mixed[0], key[1] + mixed[1]])).view(np.int32)


def row_words_on_device(key: Int[Tensor, "B 2"], positions: Int[Tensor, "B D"]) -> Int[Tensor, "2 B D"]:
    """Return the same where they lie: steps that go on without the host."""
    at = positions.to(torch.int32)
    mixed = [at * (FIRST_FACTOR - (1 << 32)) + FIRST_TERM, at * (SECOND_FACTOR - (1 << 32)) ^ SECOND_MASK]
    one, two = _mix32_(torch.stack(mixed))
    return _mix32_(torch.stack([key[:, :1] ^ one, key[:, 1:] + two]))


@cache
def id_words(vocab_size: int, device: torch.device) -> Int[Tensor, " V"]:
    """One word for each token id; made once, for good: recorded steps read it."""
    ids = np.arange(vocab_size, dtype=np.uint32) * 0x9E3779B1
    return upload([_mix32_host(ids).view(np.int32)], device)[0]


def _splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK64
    return state ^ (state >> 31)


# lowbias32 stands here for numpy and torch, in `noise_cuda` for Triton, in `engine.cpu.sampling` for LLVM: none can
# call another's. Tests hold numpy and torch to the author's form, and the other two to torch.
def _mix32_host(x: np.ndarray) -> np.ndarray:
    """lowbias32 on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


def _mix32_(x: Tensor) -> Tensor:
    """lowbias32 on int32, in place: two multiplications, three logical shifts."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return x
