"""Noise and best tokens in our own code: the bits of the rule, the values of library calls."""

import math

import numpy as np
import pytest
import torch

from rlhfspec.core.records import SampleKey, SamplingParams, Stream
from rlhfspec.engine.cpu.noise_on_demand import CpuNoiseSource
from rlhfspec.engine.cpu.sampling import MOST_LEADERS
from rlhfspec.engine.cpu.tokens import CpuNoise
from rlhfspec.engine.decoding.noise import Noise, gumbel_noise, key_words, noise_bits
from rlhfspec.engine.decoding.sampling_rule import RowSampling, choose, leader_shares, leaders

CPU = torch.device("cpu")
LEVELS = torch.tensor([[0, 1, 1, 3], [2, 0, 3, 3], [1, 1, 0, 2]])


def own_noise(words: np.ndarray, positions: np.ndarray, vocab_size: int) -> torch.Tensor:
    return CpuNoiseSource(CPU)(words, positions, vocab_size).values


def words() -> np.ndarray:
    keys = [SampleKey(run_seed=7, stream=Stream.TRAIN, sample_index=i) for i in range(3)]
    return np.stack([key_words(key, np.array([4])) for key in keys])


@pytest.mark.parametrize("vocab_size", [8, 13, 64, 5003])
def test_noise_is_that_of_the_bits(vocab_size: int) -> None:
    positions = np.arange(12).reshape(3, 4) * 1000
    noise = own_noise(words(), positions, vocab_size)
    expected = gumbel_noise(words(), positions, vocab_size)
    torch.testing.assert_close(noise, expected, rtol=3e-7, atol=1e-6)


def test_noise_of_an_id_depends_on_nothing_else() -> None:
    positions = np.arange(12).reshape(3, 4)
    noise = own_noise(words(), positions, 1003)
    assert torch.equal(own_noise(words(), positions, 40), noise[..., :40])
    assert torch.equal(own_noise(words()[1:2], positions[1:2, 2:3], 1003), noise[1:2, 2:3])


def test_noise_is_made_as_it_is_looked_at() -> None:
    positions = np.arange(12).reshape(3, 4)
    expected = own_noise(words(), positions, 1003)
    noise = CpuNoiseSource(CPU)(words(), positions, 1003)
    assert torch.equal(noise.up_to(2), expected[:, :2])
    _, _, rows = case(1003, [1.0] * 3)
    levels = torch.tensor([[0, 3], [2, 2], [0, 0]])
    # all that a level lacks is made, and nothing else
    noise.buffer[:, 2:] = math.inf
    logits = torch.zeros(3, 2, 1003)
    chosen = noise.choose(logits, levels, rows.divisor, rows.noise_factor)
    assert torch.equal(chosen, expected.argmax(-1).gather(1, levels))
    looked_at = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
    assert torch.equal(noise.buffer.isfinite().all(-1), looked_at)
    assert torch.equal(noise[:, 1:3].values, expected[:, 1:3])
    ids = torch.tensor([1000, 3, 40, 7, 8, 500, 2, 1, 0])
    assert torch.equal(noise.of_ids(ids).values, expected[..., ids])


def test_a_filter_makes_no_noise_of_levels_that_nobody_has() -> None:
    positions = np.arange(12).reshape(3, 4)
    expected = own_noise(words(), positions, 1003)
    noise = CpuNoiseSource(CPU)(words(), positions, 1003)
    noise.buffer[:] = math.inf
    logits, levels = torch.zeros(3, 2, 1003), torch.tensor([[0, 1], [0, 0], [0, 2]])
    filtered = RowSampling.of([SamplingParams(top_p=0.9), SamplingParams(), SamplingParams(top_k=1003)], CPU)
    assert filtered.any_filter
    found = choose(logits, noise, levels, filtered)
    assert torch.equal(found, choose(logits, Noise(expected), levels, filtered))
    looked_at = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0]], dtype=torch.bool)
    assert torch.equal(noise.buffer.isfinite().all(-1), looked_at)
    assert torch.equal(noise.values, expected)


def test_noise_keeps_both_tails() -> None:
    """The hash cannot be asked for its extremes: the formula is, by the float64 logarithm."""
    positions = np.arange(60_000).reshape(3, -1)
    noise = own_noise(words(), positions, 8).flatten().double()
    share = ((noise_bits(words(), positions, 8).flatten().long() & 0xFFFFFFFF).double() + 0.5) / 2**32
    low = share < 1e-4
    assert low.any() and (share > 1 - 1e-4).any()
    torch.testing.assert_close(noise[low], -(-torch.log1p(-share[low])).log(), rtol=1e-6, atol=1e-6)
    high = noise[share > 1 - 1e-4]
    # float32 resolves shares near 1 in steps of 2^-24
    assert float((high - -(-torch.log1p(-share[share > 1 - 1e-4])).log()).abs().max()) < 2e-3


def case(vocab_size: int, temperatures: list[float]) -> tuple[torch.Tensor, torch.Tensor, RowSampling]:
    random = torch.Generator().manual_seed(vocab_size)
    # rows of a wider table, as a head of whole panels gives them
    logits = torch.randn(3, 4, vocab_size + 5, generator=random)[..., :vocab_size] * 3
    noise = torch.randn(3, 6, vocab_size, generator=random)[:, 1:5]
    sampling = [SamplingParams(max_new_tokens=2, temperature=t) for t in temperatures]
    return logits, noise, RowSampling.of(sampling, CPU)


@pytest.mark.parametrize("vocab_size", [8, 9, 100, 4096])
@pytest.mark.parametrize("temperatures", [[1.0] * 3, [0.7, 0.0, 1.3]])
def test_it_chooses_what_library_calls_choose(vocab_size: int, temperatures: list[float]) -> None:
    logits, values, rows = case(vocab_size, temperatures)
    noise, library_noise = CpuNoise(values), Noise(values)
    assert noise.choose(logits, LEVELS, rows.divisor, rows.noise_factor) is not None
    chosen = choose(logits, noise, LEVELS, rows)
    counts = range(2, MOST_LEADERS + 1)
    found = [leaders(logits, noise, LEVELS, rows, count) for count in counts]
    shares = [leader_shares(logits, noise, LEVELS, rows, count) for count in counts]
    assert torch.equal(chosen, choose(logits, library_noise, LEVELS, rows))
    for count, native, share in zip(counts, found, shares, strict=True):
        library = leaders(logits, library_noise, LEVELS, rows, count)
        assert torch.equal(native.token_ids, library.token_ids)
        assert np.array_equal(native.scores, library.scores)
        np.testing.assert_allclose(native.logprobs, library.logprobs, rtol=1e-5, atol=2e-6)
        ids, of_library = leader_shares(logits, library_noise, LEVELS, rows, count)
        assert torch.equal(share[0], ids)
        torch.testing.assert_close(share[1], of_library, rtol=1e-5, atol=2e-6)


def test_of_equals_the_smallest_id_wins() -> None:
    rows = RowSampling.of([SamplingParams(max_new_tokens=2)], CPU)
    logits, noise = torch.zeros(1, 1, 29), CpuNoise(torch.zeros(1, 1, 29))
    logits[..., [5, 11, 13, 27, 28]] = 2.0
    level = torch.zeros(1, 1, dtype=torch.int64)
    assert choose(logits, noise, level, rows).item() == 5
    assert leaders(logits, noise, level, rows, 5).token_ids.flatten().tolist() == [5, 11, 13, 27, 28]
    displaced = torch.full((1, 1, 29), -1.0)
    displaced[..., [0, 8]], displaced[..., 16] = 5.0, 7.0
    assert leaders(displaced, noise, level, rows, 2).token_ids.flatten().tolist() == [16, 0]
    logprob = 2.0 - math.log(5 * math.exp(2.0) + 24)
    assert leaders(logits, noise, level, rows, 2).logprobs.ravel().tolist() == pytest.approx([logprob] * 2)
