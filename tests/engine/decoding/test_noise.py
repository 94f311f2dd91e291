"""The noise is Gumbel, independent in every argument, and never changes."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from rlhfspec.core.records import SampleKey, Stream
from rlhfspec.engine.decoding.noise import (
    STREAM_IDS,
    gumbel_from_bits,
    gumbel_noise,
    key_words,
    noise_bits,
    row_words,
    row_words_on_device,
)

VOCAB_SIZE = 151_936
PROMPT = np.array([5, 0, 7])
GOLDEN_BITS = [[0xCC5AA984, 0x9D4D6282, 0x8284763D], [0x57748F95, 0x7AB43C28, 0x94F93798]]
GOLDEN_NOISE = [0.872330, 0.426782, -0.555924, 0.912380]
KEY = SampleKey(run_seed=7, stream=Stream.TRAIN, sample_index=123_456_789_012)


def noise_of(key: SampleKey, positions: list[int], vocab_size: int = VOCAB_SIZE) -> Tensor:
    """[D, V]"""
    words = key_words(key, PROMPT)[None]
    return gumbel_noise(words, np.array([positions]), vocab_size)[0]


def test_maxima_at_a_real_vocabulary_are_distributed_as_maxima_of_gumbels() -> None:
    maxima, lowest = [], math.inf
    for sample_index in range(8):
        noise = noise_of(replace(KEY, sample_index=sample_index), list(range(32)))
        assert torch.isfinite(noise).all()
        lowest = min(lowest, noise.min().item())
        maxima.append(noise.amax(-1))
    result = stats.kstest(torch.cat(maxima).numpy(), lambda x: np.exp(-VOCAB_SIZE * np.exp(-x)))
    assert result.pvalue > 1e-4
    assert lowest > -3.0
    assert torch.cat(maxima).unique().numel() > 250, "float32 resolves the upper tail"


def test_single_values_are_standard_gumbel() -> None:
    values = noise_of(KEY, [0, 5]).flatten().numpy()
    assert stats.kstest(values, stats.gumbel_r.cdf).pvalue > 1e-4


def test_every_hash_gives_finite_noise_and_the_extremes_are_as_computed() -> None:
    bits = torch.tensor([0, 1, -1, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
    noise = gumbel_from_bits(bits)
    assert torch.isfinite(noise).all()
    exact = [-math.log(-math.log1p(-(k + 0.5) / 2**32)) for k in (0, 1, 2**31 - 1, 2**31)]
    torch.testing.assert_close(noise[[0, 1, 4, 5]], torch.tensor(exact), rtol=0, atol=1e-5)
    assert noise[2] == noise[3] == pytest.approx(-math.log(24 * math.log(2)), abs=1e-5)


NEIGHBOURS = {
    "position": (KEY, 1),
    "far position": (KEY, 4096),
    "sample_index": (replace(KEY, sample_index=KEY.sample_index + 1), 0),
    "sample_index, high word": (replace(KEY, sample_index=KEY.sample_index + (1 << 32)), 0),
    "run_seed": (replace(KEY, run_seed=KEY.run_seed + 1), 0),
    "stream": (replace(KEY, stream=Stream.EVAL), 0),
    "seed and index exchanged": (
        replace(KEY, run_seed=KEY.sample_index, sample_index=KEY.run_seed),
        0,
    ),
}


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_neighbours_are_uncorrelated(neighbour: str) -> None:
    key, shift = NEIGHBOURS[neighbour]
    positions = list(range(64, 68))
    ours = noise_of(KEY, positions)
    theirs = noise_of(key, [t + shift for t in positions])
    assert abs(correlation_z(ours, theirs)) < 5.0
    assert abs(differing_bits_z(KEY, key, positions, shift)) < 5.0


@pytest.mark.parametrize("distance", [1, 2, 64, 1024])
def test_neighbouring_token_ids_are_uncorrelated(distance: int) -> None:
    noise = noise_of(KEY, list(range(4)))
    assert abs(correlation_z(noise[:, distance:], noise[:, :-distance])) < 5.0


def test_the_correlation_check_sees_noise_that_is_reused() -> None:
    noise = noise_of(KEY, [0])
    assert correlation_z(noise, noise) > 100.0


def correlation_z(a: Tensor, b: Tensor) -> float:
    """Correlation in standard deviations of its estimate under independence."""
    a, b = a.flatten().double(), b.flatten().double()
    r = torch.corrcoef(torch.stack([a, b]))[0, 1].item()
    return r * math.sqrt(a.numel())


def differing_bits_z(key: SampleKey, other: SampleKey, positions: list[int], shift: int) -> float:
    """Number of hash bits that differ, in standard deviations from one half."""
    at = np.array([positions])
    ours = noise_bits(key_words(key, PROMPT)[None], at, VOCAB_SIZE)
    theirs = noise_bits(key_words(other, PROMPT)[None], at + shift, VOCAB_SIZE)
    differing = np.bitwise_count((ours ^ theirs).numpy().view(np.uint32)).astype(np.int64)
    return (differing.sum() - 16 * differing.size) / math.sqrt(8 * differing.size)


def test_a_wider_vocabulary_leaves_the_narrower_noise_unchanged() -> None:
    assert torch.equal(noise_of(KEY, [3, 9], 1000), noise_of(KEY, [3, 9], 4096)[:, :1000])


def test_a_batch_gives_what_each_sample_gives_alone() -> None:
    keys = [replace(KEY, sample_index=i) for i in range(3)]
    words = np.stack([key_words(key, PROMPT) for key in keys])
    together = gumbel_noise(words, np.array([[5, 6], [9, 10], [0, 1]]), 100)
    for row, (key, positions) in enumerate(zip(keys, ([5, 6], [9, 10], [0, 1]), strict=True)):
        assert torch.equal(together[row], noise_of(key, positions, 100))


@pytest.mark.parametrize("other", [[5, 0], [5, 0, 7, 0], [0, 5, 7], [5, 0, 8], [7 << 32, 0, 5]])
def test_prompts_of_one_key_share_no_noise(other: list[int]) -> None:
    at = np.arange(64)[None]
    ours = noise_bits(key_words(KEY, PROMPT)[None], at, 4096)
    theirs = noise_bits(key_words(KEY, np.array(other))[None], at, 4096)
    # 2^18 pairs of 32 bits: one in 16,384 is expected equal by chance
    assert int((ours == theirs).sum()) <= 2


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int64])
def test_noise_does_not_depend_on_how_a_prompt_lies(dtype: type) -> None:
    spread = np.repeat(PROMPT.astype(dtype), 2)[::2]
    assert key_words(KEY, spread).tolist() == key_words(KEY, PROMPT).tolist()


M32 = 0xFFFFFFFF


def slow_mix(x: int) -> int:
    """lowbias32 as its author prints it."""
    x ^= x >> 16
    x = x * 0x7FEB352D & M32
    x ^= x >> 15
    x = x * 0x846CA68B & M32
    return x ^ x >> 16


def slow_words(key: SampleKey) -> tuple[int, int]:
    prompt = b"".join(token.to_bytes(8, "little") for token in PROMPT.tolist())
    digest = int.from_bytes(hashlib.blake2b(prompt, digest_size=8).digest(), "little")
    state = 0
    for part in (key.run_seed, STREAM_IDS[key.stream], key.sample_index, digest):
        state = ((state ^ part) + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state % 2**32, state >> 32


def slow_bits(key: SampleKey, position: int, token_id: int) -> int:
    low, high = slow_words(key)
    first = slow_mix(low ^ slow_mix((position * 0x9E3779B9 + 0x3C6EF372) & M32))
    second = slow_mix((high + slow_mix((position * 0x85EBCA6B & M32) ^ 0x27D4EB2F)) & M32)
    token = slow_mix(token_id * 0x9E3779B1 & M32)
    return slow_mix(slow_mix((token + first) & M32) ^ second)


@pytest.mark.parametrize("sample_index", [0, 1, 2**63 + 5, 2**64 - 1])
def test_the_tensor_hash_equals_the_hash_in_whole_numbers(sample_index: int) -> None:
    key = SampleKey(run_seed=2**62 + 3, stream=Stream.EVAL, sample_index=sample_index)
    positions, ids = [0, 1, 511, 131_071], [0, 1, 2, 63, 50_000, 151_935]
    bits = noise_bits(key_words(key, PROMPT)[None], np.array([positions]), VOCAB_SIZE)
    got = bits[0][:, ids].numpy().view(np.uint32)
    expected = [[slow_bits(key, t, v) for v in ids] for t in positions]
    assert got.tolist() == expected


def test_the_noise_never_changes_between_versions() -> None:
    bits = noise_bits(key_words(KEY, PROMPT)[None], np.array([[0, 77]]), VOCAB_SIZE)
    assert bits[0][:, [0, 1, 151_935]].numpy().view(np.uint32).tolist() == GOLDEN_BITS
    assert noise_of(KEY, [77], 4)[0].tolist() == pytest.approx(GOLDEN_NOISE, abs=1e-6)


def test_words_made_where_they_lie_are_the_hosts() -> None:
    random = np.random.default_rng(0)
    words = random.integers(-(1 << 31), 1 << 31, (64, 2)).astype(np.int32)
    positions = random.integers(0, 1 << 20, (64, 3))
    on_device = row_words_on_device(torch.from_numpy(words), torch.from_numpy(positions))
    assert on_device.numpy().tolist() == row_words(words, positions).tolist()
