"""Tiny random pairs, request makers and an engine maker, shared by the engine's tests."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.records import Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.model.compute_backend import ComputeBackend
from rlhfspec.engine.weights.causal_lm import DTYPES
from rlhfspec.engine.weights.loading import freeze
from tests.helpers.cuda_layouts import cuda_attention_layout
from tests.helpers.random_heads import random_head

VOCAB_SIZE = 64
PLANS = {
    "off": SpeculationConfig(policy="off"),
    "chain4": SpeculationConfig(policy="fixed", num_nodes=4, branching=1),
    "tree8": SpeculationConfig(policy="fixed", num_nodes=8, depth=4, branching=2),
    "tree16": SpeculationConfig(policy="fixed", num_nodes=16, depth=4, branching=3),
    "suffix": SpeculationConfig(policy="fixed", drafter="suffix", num_nodes=5),
    "head chain": SpeculationConfig(policy="fixed", drafter="head", num_nodes=5, branching=1),
    "head tree": SpeculationConfig(policy="fixed", drafter="head", num_nodes=8, depth=4, branching=3),
    "model pair": SpeculationConfig(policy="fixed", num_nodes=5, depth=5, look_up="suffix"),
    "head pair": SpeculationConfig(
        policy="fixed", drafter="head", num_nodes=8, depth=4, branching=3, look_up="suffix"
    ),
    "bandit": SpeculationConfig(policy="bandit", max_nodes=12, max_depth=8),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    # jobs that other folders' tests run in the same process have set it
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _attention_lies_as_on_cuda() -> Iterator[None]:
    with cuda_attention_layout():
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target, and a draft model near enough to be accepted often and far enough to be refused often."""

    target: PreTrainedModel
    draft: PreTrainedModel


def tiny_llama(seed: int, dtype: str, *, num_layers: int = 2, **changes: int | bool) -> PreTrainedModel:
    """Hidden 64, 4 heads over 2 KV heads; weights large enough that every layer and the context matter."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
    }
    # not `.to(dtype)` afterwards: that would round the rotary frequencies too
    model = AutoModelForCausalLM.from_config(LlamaConfig(**(settings | changes)), dtype=DTYPES[dtype])
    model.lm_head.weight.data.mul_(3.0)
    return freeze(model)


def disturbed(model: PreTrainedModel) -> PreTrainedModel:
    """Add noise to every matrix, a quarter of its size."""
    torch.manual_seed(5)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.add_(torch.randn_like(weight) * weight.data.std() * 0.25)
    return model


@pytest.fixture(scope="session")
def new_model() -> Callable[..., PreTrainedModel]:
    return tiny_llama


@pytest.fixture(scope="session")
def pairs() -> dict[str, Pair]:
    return {
        dtype: Pair(target=tiny_llama(1, dtype), draft=disturbed(tiny_llama(1, dtype))) for dtype in DTYPES
    }


@pytest.fixture(scope="session")
def make_engine(pairs: dict[str, Pair]) -> Callable[..., Engine]:
    """Build an engine for a plan by name; the probe has its own tests."""

    def make(
        plan: str,
        *,
        dtype: str = "float32",
        batch: int = 8,
        max_total_tokens: int = 192,
        pair: Pair | None = None,
        backend: ComputeBackend | None = None,
    ) -> Engine:
        pair = pair or pairs[dtype]
        return build_engine(
            pair.target,
            random_head(pair.target, draft_vocab_size=48) if PLANS[plan].drafter == "head" else pair.draft,
            engine=EngineConfig(device="cpu", max_running_samples=batch, max_prefill_tokens=96, probe=False),
            speculation=PLANS[plan],
            max_total_tokens=max_total_tokens,
            backend=backend,
        )

    return make


@pytest.fixture(scope="session")
def make_requests() -> Callable[..., list[SampleRequest]]:
    """Random prompts; one sampling for all or one for each."""

    def make(
        prompt_lengths: Sequence[int],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        vocab_size: int = VOCAB_SIZE,
        seed: int = 3,
    ) -> list[SampleRequest]:
        random = np.random.default_rng(seed)
        each = [sampling] * len(prompt_lengths) if isinstance(sampling, SamplingParams) else sampling
        return [
            SampleRequest(
                key=SampleKey(run_seed=11, stream=Stream.BENCH, sample_index=index),
                prompt=Prompt(prompt_id=index, token_ids=random.integers(0, vocab_size, length)),
                sampling=params,
            )
            for index, (length, params) in enumerate(zip(prompt_lengths, each, strict=True))
        ]

    return make


@pytest.fixture(scope="session")
def dense_logits() -> Callable[[PreTrainedModel, np.ndarray], Tensor]:
    """One plain Hugging Face forward, eager attention, over a copy of the model: [T, V] float32."""
    copies: dict[int, tuple[PreTrainedModel, PreTrainedModel]] = {}

    @torch.inference_mode()
    def forward(model: PreTrainedModel, token_ids: np.ndarray) -> Tensor:
        if id(model) not in copies:
            plain = copy.deepcopy(model)
            plain.set_attn_implementation("eager")
            copies[id(model)] = (model, plain)
        ids = torch.from_numpy(np.asarray(token_ids))[None]
        return copies[id(model)][1](input_ids=ids, use_cache=False).logits[0].float()

    return forward
