"""The engine's samples are the target's distribution, end to end: chi-square over pairs of consecutive tokens.

A one-layer model whose attention window is one token is a Markov chain: its transition matrix is exact, and
every pair of neighbours in 25,000 sampled tokens tests it (`test_rule` draws 200,000 by the rule alone).
Noise that is shared between positions or samples
leaves single tokens looking right and shows here.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

import rlhfspec.engine.decode_step
import rlhfspec.engine.decoding.running_batch
from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.records import Prompt, SampleKey, SampleRequest, SamplingParams
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.decoding.noise import key_words
from rlhfspec.engine.decoding.sampling_rule import RowSampling, kept_tokens
from rlhfspec.engine.weights.loading import freeze
from tests.helpers.backends import own_backend

VOCAB_SIZE = 8
NUM_SAMPLES, NUM_TOKENS = 512, 50
SMALLEST_P = 1e-4
TREE = SpeculationConfig(policy="fixed", num_nodes=6, depth=3, branching=2)
OFF = SpeculationConfig(policy="off")


def markov_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            sliding_window=1,
            initializer_range=0.3,
        )
    )
    return freeze(model)


@pytest.fixture(scope="module")
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    return markov_model(0), markov_model(1)


@pytest.fixture(scope="module")
def transitions(
    models: tuple[PreTrainedModel, PreTrainedModel], dense_logits: Callable[..., torch.Tensor]
) -> np.ndarray:
    """Row a: probabilities of the token behind a, by the plain Hugging Face forward."""
    alone = torch.cat([dense_logits(models[0], np.array([a])) for a in range(VOCAB_SIZE)])
    sequence = np.random.default_rng(0).integers(0, VOCAB_SIZE, 50)
    torch.testing.assert_close(dense_logits(models[0], sequence), alone[sequence])
    return torch.softmax(alone.double(), -1).numpy()


def filtered(transitions: np.ndarray, top_p: float) -> np.ndarray:
    out = transitions.copy()
    for row in out:
        order = np.argsort(-row)
        row[order[int(np.searchsorted(np.cumsum(row[order]), top_p)) + 1 :]] = 0.0
    return out / out.sum(1, keepdims=True)


def pairs_p(
    models: tuple[PreTrainedModel, PreTrainedModel],
    transitions: np.ndarray,
    speculation: SpeculationConfig,
    top_p: float,
) -> float:
    """Sample 25,600 tokens; p-value of all pairs of neighbours under the transition matrix."""
    engine = build_engine(
        *models,
        engine=EngineConfig(
            device="cpu", max_running_samples=NUM_SAMPLES, max_prefill_tokens=4096, probe=False
        ),
        speculation=speculation,
        max_total_tokens=NUM_TOKENS + 2,
    )
    sampling = SamplingParams(top_p=top_p, max_new_tokens=NUM_TOKENS)
    requests = [
        SampleRequest(
            key=SampleKey(run_seed=1, sample_index=index),
            prompt=Prompt(prompt_id=0, token_ids=np.array([3, index % VOCAB_SIZE])),
            sampling=sampling,
        )
        for index in range(NUM_SAMPLES)
    ]
    done = engine.generate(requests)
    if speculation is not OFF:
        assert engine.stats.num_accepted_rank2_plus > 500
    tokens = np.stack(
        [np.append(r.prompt.token_ids[1:], c.token_ids) for r, c in zip(requests, done, strict=True)]
    )
    counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    np.add.at(counts, (tokens[:, :-1].ravel(), tokens[:, 1:].ravel()), 1)
    expected = filtered(transitions, top_p)
    if counts[expected == 0].any():
        return 0.0
    inside = expected > 0
    expected_counts = (expected * counts.sum(1, keepdims=True))[inside]
    statistic = float(((counts[inside] - expected_counts) ** 2 / expected_counts).sum())
    return float(stats.chi2.sf(statistic, inside.sum() - VOCAB_SIZE))


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_speculative_samples_follow_the_targets_distribution(models, transitions, top_p: float) -> None:
    assert pairs_p(models, transitions, TREE, top_p) > SMALLEST_P


def _reuse_noise(patch: pytest.MonkeyPatch) -> None:
    source = type(own_backend().noise)
    make = source.__call__

    def reused(self, words, positions, vocab_size):
        return make(self, words, np.zeros_like(positions), vocab_size)

    patch.setattr(source, "__call__", reused)


def _drop_group_member(patch: pytest.MonkeyPatch) -> None:
    def words_of_run(key: SampleKey, prompt: np.ndarray) -> np.ndarray:
        return key_words(SampleKey(run_seed=key.run_seed, stream=key.stream, sample_index=0), prompt)

    patch.setattr(rlhfspec.engine.decoding.running_batch, "key_words", words_of_run)


def _filter_after_argmax(patch: pytest.MonkeyPatch) -> None:
    def wrong(
        scaled: torch.Tensor, noise: torch.Tensor, rows: RowSampling, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        tokens = (scaled + noise).argmax(-1)
        inside = kept_tokens(scaled, rows).gather(-1, tokens[..., None])[..., 0]
        tokens = torch.where(inside, tokens, scaled.argmax(-1))
        return torch.nn.functional.one_hot(tokens, scaled.shape[-1]).float()

    patch.setattr(rlhfspec.engine.decoding.sampling_rule, "perturb", wrong)


@pytest.mark.parametrize("plant", [_reuse_noise, _drop_group_member, _filter_after_argmax])
def test_the_check_catches_planted_bugs(
    models, transitions, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    assert pairs_p(models, transitions, OFF, 0.8) < SMALLEST_P
