"""The sampling rule by hand, and the distribution it samples; planted bugs fail the same check."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from rlhfspec.core.records import SampleKey, SamplingParams
from rlhfspec.engine.decoding.noise import gumbel_noise, key_words
from rlhfspec.engine.decoding.sampling_rule import RowSampling, emitted_logprobs, kept_tokens, perturb, scale

CPU = torch.device("cpu")
LOGITS = [2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 0.25]
NUM_KEYS, NUM_POSITIONS = 2000, 100
SMALLEST_P = 1e-4


def rows_of(*params: SamplingParams) -> RowSampling:
    return RowSampling.of(list(params), CPU)


def kept(probs: list[float], **settings: float | int) -> list[int]:
    """Ids that the filters keep of a distribution."""
    scaled = torch.tensor([[probs]]).log()
    return torch.nonzero(kept_tokens(scaled, rows_of(SamplingParams(**settings)))[0, 0]).flatten().tolist()


def test_top_k_keeps_the_k_most_probable() -> None:
    assert kept([0.1, 0.4, 0.2, 0.3], top_k=2) == [1, 3]
    assert kept([0.1, 0.4, 0.2, 0.3], top_k=0) == [0, 1, 2, 3]
    assert kept([0.1, 0.4, 0.2, 0.3], top_k=9) == [0, 1, 2, 3]


def test_top_p_keeps_the_smallest_set_that_reaches_its_mass() -> None:
    assert kept([0.1, 0.4, 0.2, 0.3], top_p=0.65) == [1, 3]
    assert kept([0.1, 0.4, 0.2, 0.3], top_p=0.75) == [1, 2, 3]
    assert kept([0.1, 0.4, 0.2, 0.3], top_p=0.01) == [1], "the most probable token always stays"
    assert kept([0.1, 0.4, 0.2, 0.3], top_p=1.0) == [0, 1, 2, 3]


def test_ties_go_to_the_smaller_token_id() -> None:
    assert kept([0.25, 0.25, 0.25, 0.25], top_k=2) == [0, 1]
    assert kept([0.25, 0.25, 0.25, 0.25], top_p=0.6) == [0, 1, 2]


def test_top_p_measures_mass_among_the_top_k() -> None:
    # alone, 0.4 + 0.3 reach 0.65; among the top three (mass 0.9) 0.4 is 0.44 and 0.4 + 0.3 are 0.78
    probs = [0.1, 0.4, 0.2, 0.3]
    assert kept(probs, top_k=3, top_p=0.75) == [1, 3]
    assert kept(probs, top_p=0.75) == [1, 2, 3]


def test_min_p_drops_what_is_less_likely_than_a_share_of_the_best_and_top_p_measures_the_rest() -> None:
    probs = [0.05, 0.4, 0.19, 0.36]
    assert kept(probs, min_p=0.4) == kept(probs, min_p=0.4, top_k=3) == [1, 2, 3]
    assert kept(probs, min_p=0.5) == [1, 3] and kept(probs, min_p=1.0) == [1]
    assert kept(probs, min_p=0.5, top_k=1) == [1]
    # 0.4 is 0.53 of what min-p keeps: with 0.36 it reaches 0.99, among all it would not
    assert kept(probs, min_p=0.5, top_p=0.5) == [1] and kept(probs, top_p=0.5) == [1, 3]
    # of p / T, as in vLLM: at T = 2 ratios are roots
    rows = rows_of(SamplingParams(temperature=2.0, min_p=0.5))
    marks = kept_tokens(scale(torch.tensor([[probs]]).log(), rows), rows)
    assert marks.flatten().nonzero().flatten().tolist() == [1, 2, 3]


def test_greedy_takes_the_largest_logit_whatever_the_noise_and_filters() -> None:
    rows = rows_of(SamplingParams(temperature=0.0, top_k=1, top_p=0.1))
    scaled = scale(torch.tensor([[LOGITS]]), rows)
    noise = torch.zeros_like(scaled)
    noise[..., 6] = 100.0
    assert perturb(scaled, noise, rows).argmax(-1).item() == 0


def test_temperature_divides_logits_and_rows_keep_their_own() -> None:
    rows = rows_of(*(SamplingParams(temperature=t) for t in (0.5, 0.0, 2.0)))
    scaled = scale(torch.tensor([[[1.0, 3.0]]] * 3), rows)
    assert scaled.tolist() == [[[2.0, 6.0]], [[1.0, 3.0]], [[0.5, 1.5]]]


def test_logprobs_by_hand() -> None:
    probs = [0.1, 0.4, 0.2, 0.3]
    rows = rows_of(
        SamplingParams(top_p=0.65), SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=3)
    )
    scaled = torch.tensor([[probs]] * 4).log()
    policy, sampling = emitted_logprobs(scaled, torch.tensor([[3], [3], [1], [2]]), rows)
    logs = [math.log(p) for p in (0.3, 0.3, 0.4, 0.2)]
    assert policy.flatten().tolist() == pytest.approx(logs, abs=1e-6)
    expected = [math.log(0.3 / 0.7), math.log(0.3), 0.0, math.log(0.2 / 0.9)]
    assert sampling.flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_a_row_does_not_depend_on_the_filters_of_others() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 64)
    noise = torch.rand(2, 3, 64)
    alone = rows_of(SamplingParams())
    mixed = rows_of(SamplingParams(), SamplingParams(temperature=0.5, top_k=3, top_p=0.8))
    ids = torch.randint(64, (2, 3))
    assert torch.equal(
        perturb(scale(logits[:1], alone), noise[:1], alone), perturb(scale(logits, mixed), noise, mixed)[:1]
    )
    for ours, theirs in zip(
        emitted_logprobs(logits[:1], ids[:1], alone),
        emitted_logprobs(scale(logits, mixed), ids, mixed),
        strict=True,
    ):
        assert torch.equal(ours, theirs[:1])


Noise = Callable[[Tensor, Tensor, int], Tensor]
Rule = Callable[[Tensor, Tensor, RowSampling], Tensor]


def chi_square_p(params: SamplingParams, noise: Noise, rule: Rule) -> float:
    """Draw 200,000 tokens over keys and positions; p-value of their counts under the filtered softmax."""
    keys = (SampleKey(run_seed=5, sample_index=index) for index in range(NUM_KEYS))
    words = np.stack([key_words(key, np.array([4])) for key in keys])
    positions = np.broadcast_to(np.arange(NUM_POSITIONS), (NUM_KEYS, NUM_POSITIONS))
    rows = rows_of(*[params] * NUM_KEYS)
    scaled = scale(torch.tensor(LOGITS).expand(NUM_KEYS, NUM_POSITIONS, -1), rows)
    tokens = rule(scaled, noise(words, positions, len(LOGITS)), rows).flatten()
    counts = np.bincount(tokens.numpy(), minlength=len(LOGITS))
    expected = expected_probs(params)
    if counts[expected == 0].any():
        return 0.0
    support = expected > 0
    return float(stats.chisquare(counts[support], expected[support] * counts.sum()).pvalue)


def expected_probs(params: SamplingParams) -> np.ndarray:
    """Softmax(logits / T) cut by min_p, then to the smallest set with mass top_p."""
    probs = np.exp(np.array(LOGITS) / params.temperature)
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0.0
    probs /= probs.sum()
    order = np.argsort(-probs)
    size = int(np.searchsorted(np.cumsum(probs[order]), params.top_p)) + 1
    probs[order[size:]] = 0.0
    return probs / probs.sum()


def right_rule(scaled: Tensor, noise: Tensor, rows: RowSampling) -> Tensor:
    return perturb(scaled, noise, rows).argmax(-1)


SAMPLINGS = {
    "T=1": SamplingParams(),
    "top-p 0.8": SamplingParams(top_p=0.8),
    "T=0.7 top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "T=2 min-p 0.3": SamplingParams(temperature=2.0, min_p=0.3),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_rule_samples_the_filtered_softmax(name: str) -> None:
    assert chi_square_p(SAMPLINGS[name], gumbel_noise, right_rule) > SMALLEST_P


def reused_across_positions(words: np.ndarray, positions: np.ndarray, vocab_size: int) -> Tensor:
    return gumbel_noise(words, np.zeros_like(positions), vocab_size)


def without_group_member(words: np.ndarray, positions: np.ndarray, vocab_size: int) -> Tensor:
    return gumbel_noise(np.broadcast_to(words[:1], words.shape), positions, vocab_size)


def filter_after_argmax(scaled: Tensor, noise: Tensor, rows: RowSampling) -> Tensor:
    """The bug: draw from everything, then replace what the filter drops by the most probable token."""
    tokens = (scaled + noise).argmax(-1)
    inside = kept_tokens(scaled, rows).gather(-1, tokens[..., None])[..., 0]
    return torch.where(inside, tokens, scaled.argmax(-1))


@pytest.mark.parametrize(
    ("noise", "rule"),
    [
        pytest.param(reused_across_positions, right_rule, id="noise reused across positions"),
        pytest.param(without_group_member, right_rule, id="group member dropped from the key"),
        pytest.param(gumbel_noise, filter_after_argmax, id="filter applied after the argmax"),
    ],
)
def test_the_check_catches_planted_bugs(noise: Noise, rule: Rule) -> None:
    assert chi_square_p(SAMPLINGS["top-p 0.8"], noise, rule) < SMALLEST_P
