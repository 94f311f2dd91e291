"""A tiny model and hand-made rollouts for the learner's tests."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from tiny_llama import tiny_llama
from transformers import LlamaForCausalLM

from rlhfspec.core.records import Completion, FinishReason, Prompt, Reward, Rollout, SampleKey, WeightSpan
from rlhfspec.engine.decoding.logprobs import token_logprobs
from rlhfspec.learning.training.batching import PackedSequences
from rlhfspec.learning.training.objectives.policy import SeenLogits
from tests.helpers.cuda_layouts import cuda_attention_layout


@pytest.fixture(scope="module", autouse=True)
def _attention_lies_as_on_cuda() -> Iterator[None]:
    with cuda_attention_layout():
        yield


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """Far from uniform, so that a mistake in a log-probability shows."""
    return tiny_llama(seed, initializer_range=0.3).eval()


def seen_logits(sample_indices, lengths, scaled) -> SeenLogits:
    """For an observer that does not ask which tokens they predict."""
    return SeenLogits(sample_indices, lengths, scaled, PackedSequences.of([np.array([1, 2])]))


@pytest.fixture
def make_model() -> Callable[..., LlamaForCausalLM]:
    """Give `make_model(seed=0)`."""
    return tiny_model


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_model()


@pytest.fixture
def make_rollouts(rollout_maker: Callable[..., list[Rollout]]) -> Callable[..., list[Rollout]]:
    """See `rollout_maker`."""
    return rollout_maker


@pytest.fixture(scope="session")
def rollout_maker() -> Callable[..., list[Rollout]]:
    """Make rollouts whose old log-probabilities are the model's own, of random tokens or of given ones."""

    def make(
        model: LlamaForCausalLM,
        num: int = 6,
        *,
        seed: int = 0,
        temperature: float = 1.0,
        reward: Callable[[np.ndarray], float] = lambda tokens: float(tokens[0] % 3),
        group_size: int = 2,
        pairs: Sequence[tuple[np.ndarray, np.ndarray]] | None = None,
    ) -> list[Rollout]:
        rng = np.random.default_rng(seed)
        rollouts = []
        for index in range(num):
            prompt = rng.integers(2, 19, size=int(rng.integers(1, 5)))
            response = rng.integers(2, 19, size=int(rng.integers(1, 9)))
            if pairs is not None:
                prompt, response = pairs[index]
            logprobs = _dense_logprobs(model, prompt, response, temperature)
            completion = Completion(
                key=SampleKey(run_seed=0, sample_index=index),
                prompt_id=index,
                group_id=index // group_size,
                epoch=0,
                token_ids=response,
                policy_logprobs=logprobs,
                sampling_logprobs=logprobs,
                finish_reason=FinishReason.STOP,
                weight_spans=(WeightSpan(weight_version=0, first_position=0),),
                instance="test",
                num_decode_steps=len(response),
                num_accepted_tokens=0,
            )
            rollouts.append(
                Rollout(
                    prompt=Prompt(prompt_id=index, token_ids=prompt),
                    completion=completion,
                    response_text="",
                    reward=Reward(value=reward(response)),
                )
            )
        return rollouts

    return make


@torch.no_grad()
def _dense_logprobs(
    model: LlamaForCausalLM, prompt: np.ndarray, response: np.ndarray, temperature: float
) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
    logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return token_logprobs(logits, ids[0, len(prompt) :], temperature).numpy()
