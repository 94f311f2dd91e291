"""Weights without a forward decode what transformers' module decodes, bit by bit; what they cannot be is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.errors import ModelError, NotFiniteError
from rlhfspec.core.records import Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.weights.bare_llama import BareLlama, bare_llama, same_model
from rlhfspec.engine.weights.causal_lm import CausalLM
from rlhfspec.engine.weights.chunks import load_into, unique_tensors
from rlhfspec.engine.weights.loading import freeze

ROOT = Path(__file__).resolve().parents[3]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, wide heads": {"model_type": "llama", "head_dim": 32},
    "llama 3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "mistral, window": {"model_type": "mistral", "sliding_window": 16},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, window in one layer": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
}


def stock_model(changes: dict[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(3)
    return freeze(AutoModelForCausalLM.from_config(AutoConfig.for_model(**(SIZES | changes)), dtype=dtype))


def bare_of(model: PreTrainedModel) -> BareLlama:
    bare = bare_llama(model.config.to_json_string(use_diff=False), model.dtype)
    load_into(bare, dict(unique_tensors(model)))
    return bare


def decoded(model: CausalLM) -> list[tuple[bytes, bytes]]:
    torch.set_num_threads(1)
    engine = build_engine(
        model,
        None,
        engine=EngineConfig(device="cpu", max_running_samples=3, probe=False),
        speculation=SpeculationConfig(policy="off"),
        max_total_tokens=80,
    )
    assert engine.runner.is_own
    requests = [
        SampleRequest(
            key=SampleKey(run_seed=1, stream=Stream.BENCH, sample_index=index),
            prompt=Prompt(prompt_id=str(index), token_ids=np.arange(1, 20 + index), text=""),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=24, stop_token_ids=()),
        )
        for index in range(3)
    ]
    return [(one.token_ids.tobytes(), one.policy_logprobs.tobytes()) for one in engine.generate(requests)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_alone_decode_what_the_module_decodes(name: str, dtype: torch.dtype) -> None:
    stock = stock_model(CONFIGS[name], dtype)
    bare = bare_of(stock)
    assert same_model(bare, stock)
    assert decoded(bare) == decoded(stock)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"intermediate_size": 64},
        {"head_dim": 32},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_module_of_another_config_is_not_the_same(change: dict[str, Any]) -> None:
    stock = stock_model(CONFIGS["llama"])
    assert not same_model(bare_of(stock), stock_model({"model_type": "llama"} | change))


def test_a_window_that_differs_in_one_layer_is_not_the_same() -> None:
    windowed = CONFIGS["qwen2, window in one layer"]
    stock = stock_model(windowed)
    other = stock_model(windowed | {"layer_types": ["sliding_attention", "full_attention"]})
    assert same_model(bare_of(stock), stock) and not same_model(bare_of(stock), other)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt2"},
        {"quantization_config": {"bits": 4}},
        {"num_attention_heads": 5, "head_dim": None},
        {"rope_parameters": None},
        {"hidden_size": "64"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_config_of_more_than_these_modules_hold_is_refused(change: dict[str, Any]) -> None:
    tree = json.loads(stock_model(CONFIGS["llama"]).config.to_json_string(use_diff=False))
    tree |= change
    if tree.get("head_dim", 0) is None:
        del tree["head_dim"]
    with pytest.raises(ModelError, match="no bare module can be made of this config"):
        bare_llama(json.dumps(tree), torch.float32)


def test_weights_whose_logits_are_not_finite_are_refused_without_an_oracle() -> None:
    bare = bare_of(stock_model(CONFIGS["llama"]))
    bare.model.norm.weight[3] = float("nan")
    with pytest.raises(NotFiniteError, match=r"model\.norm\.weight"):
        decoded(bare)


def test_finite_weights_whose_logits_overflow_are_told_apart() -> None:
    bare = bare_of(stock_model(CONFIGS["llama"]))
    bare.model.norm.weight[3] = 3.4e38
    with pytest.raises(NotFiniteError, match=r"the llama model .* its weights are finite, so torch\.float32"):
        decoded(bare)


def test_what_an_instance_imports_is_not_transformers() -> None:
    """Its modelling code takes longer to import than all else of a start."""
    script = (
        "import sys, rlhfspec.actors.generation.generation_actor, rlhfspec.actors.generation.engine_host\n"
        "import rlhfspec.actors.migration.ray_endpoint\n"
        "assert 'torch' in sys.modules and 'rlhfspec.engine.build' in sys.modules\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=300)
