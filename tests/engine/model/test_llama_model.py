"""A model built from a config decodes what transformers' module decodes; what it cannot be is left to transformers."""

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
from rlhfspec.engine.build import build_engine, published_model
from rlhfspec.engine.model.llama_model import LlamaModel, known_config
from rlhfspec.engine.weights.causal_lm import CausalLM
from rlhfspec.engine.weights.chunks import model_checksum, pack_weights, unique_tensors, weight_views
from rlhfspec.engine.weights.llama_config import LlamaConfig, Rotary, sliding_window, weight_shapes
from rlhfspec.engine.weights.loading import freeze
from tests.helpers.backends import own_backend, rows_backend, torch_backend

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


def own_of(model: PreTrainedModel, **options: Any) -> LlamaModel:
    """As an instance makes it: from the manifest and its chunks."""
    manifest, chunks = pack_weights(model, name="target", weight_version=0)
    dtype = str(model.dtype).removeprefix("torch.")
    options = {"backend": own_backend(), "who": "the target"} | options
    own = published_model(manifest, [weight_views(manifest, chunks)], dtype, **options)
    assert isinstance(own, LlamaModel) and own.checksum == manifest.checksum
    return own


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
def test_it_decodes_what_transformers_module_was_found_to_decode(name: str, dtype: torch.dtype) -> None:
    """The module is the oracle: its names and shapes are ours, and an engine of it was compared with it."""
    stock = stock_model(CONFIGS[name], dtype)
    own = own_of(stock)
    assert own.shapes == {weight: tuple(tensor.shape) for weight, tensor in unique_tensors(stock)}
    assert list(own.shapes) == [weight for weight, _ in unique_tensors(stock)]
    assert own.num_parameters() == sum(weight.numel() for weight in stock.parameters())
    rotary: Any = stock.base_model.rotary_emb
    assert torch.equal(Rotary(own.config).inv_freq, rotary.inv_freq)
    assert Rotary(own.config).attention_scaling == rotary.attention_scaling
    for index, layer in enumerate(stock.base_model.layers):
        of_config = stock.config.sliding_window if own.config.model_type == "mistral" else None
        window = getattr(layer.self_attn, "sliding_window", of_config)
        assert sliding_window(own.config, index) == window
    assert decoded(own) == decoded(stock)


@pytest.mark.parametrize("backend", [own_backend, torch_backend, rows_backend])
@pytest.mark.parametrize("name", ["llama", "llama, tied", "qwen3"])
def test_parts_that_are_overwritten_are_laid_out_as_a_whole_version_is(name: str, backend) -> None:
    stock = stock_model(CONFIGS[name])
    whole, own = (own_of(stock, backend=backend()) for _ in range(2))
    room: dict[str, torch.Tensor] = {}

    def parts():
        for weight, tensor in unique_tensors(stock):
            room[weight] = tensor.clone()
            yield {weight: room[weight]}
            room[weight].fill_(torch.nan)

    assert own.load(own.shapes, parts()) is None
    for (mine, _), (theirs, _) in zip(own._linears(), whole._linears(), strict=True):
        assert torch.equal(mine.unpacked()[0], theirs.unpacked()[0])
    assert torch.equal(own.embedding, whole.embedding)


@pytest.mark.parametrize("name", ["llama", "llama, tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_head_is_given_back_as_it_was_published(name: str, dtype: torch.dtype) -> None:
    stock = stock_model(CONFIGS[name], dtype)
    head: Any = stock.get_output_embeddings()
    assert torch.equal(own_of(stock, keeps_head=True).output_weight, head.weight)
    assert torch.equal(own_of(stock).final_norm, stock.base_model.norm.weight)
    if dtype == torch.float32 and name == "llama":
        with pytest.raises(ModelError, match="nobody asked to keep it"):
            _ = own_of(stock).output_weight


@pytest.mark.parametrize("stock", [False, True])
def test_what_is_not_ours_is_left_to_transformers(stock: bool) -> None:
    model = stock_model(CONFIGS["llama"] if stock else {"model_type": "gemma", "head_dim": 16})
    manifest, chunks = pack_weights(model, name="target", weight_version=0)
    made = published_model(
        manifest, [weight_views(manifest, chunks)], "float32", backend=own_backend(), who="it", stock=stock
    )
    assert isinstance(made, PreTrainedModel) and model_checksum(made) == manifest.checksum
    biased = json.loads(manifest.hf_config_json) | {"attention_bias": True}
    shapes = {spec.name: tuple(spec.shape) for spec in manifest.tensors}
    assert (known_config(manifest.hf_config_json, shapes) is not None) == stock
    assert known_config(json.dumps(biased), shapes) is None, "weights that the config does not describe"


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt2"},
        {"quantization_config": {"bits": 4}},
        {"num_attention_heads": 5, "head_dim": None},
        {"rope_parameters": None},
        {"hidden_size": "64"},
        {"hidden_act": "gelu"},
        {"num_key_value_heads": 3},
        {"vocab_size": 0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_config_of_more_than_we_hold_is_refused(change: dict[str, Any]) -> None:
    tree = json.loads(stock_model(CONFIGS["llama"]).config.to_json_string(use_diff=False))
    tree |= change
    if tree.get("head_dim", 0) is None:
        del tree["head_dim"]
    with pytest.raises(ModelError, match="no Llama or kin can be made of this config"):
        weight_shapes(LlamaConfig.of(json.dumps(tree)))


@pytest.mark.parametrize(
    ("value", "cause"),
    [(float("nan"), r"model\.norm\.weight"), (3.4e38, r"its weights are finite, so torch\.float32")],
)
def test_logits_that_are_not_finite_are_refused_without_an_oracle(value: float, cause: str) -> None:
    stock = stock_model(CONFIGS["llama"])
    own, tensors = own_of(stock), dict(unique_tensors(stock))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors["model.norm.weight"][3] = value
    own.load(tensors, [tensors])
    with pytest.raises(NotFiniteError, match=f"the llama model .*{cause}"):
        decoded(own)


def test_what_an_instance_imports_is_not_transformers() -> None:
    """Its modelling code takes longer to import than all else of a start."""
    script = (
        "import sys, rlhfspec.actors.generation.generation_actor, rlhfspec.actors.generation.engine_host\n"
        "import rlhfspec.actors.generation.ray_endpoint\n"
        "assert 'torch' in sys.modules and 'rlhfspec.engine.build' in sys.modules\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=300)
