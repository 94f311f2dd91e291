"""The start-up comparison decodes: what is wrong only after prefill, or of another shape, does not start."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.errors import ModelError, NotFiniteError, NumericsError
from rlhfspec.core.records import Prompt, SampleKey, SampleRequest, SamplingParams
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.cache.kv_pool import KVPool, KVShape
from rlhfspec.engine.cache.segments import segments_of
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.model.comparison import continuation_fault, is_rounding
from rlhfspec.engine.model.compute_backend import PoolAttention
from tests.helpers.backends import own_backend

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
STATE_ELSEWHERE = {
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"]}, r"layers 0, 2 \(conv\) keep state outside"),
    "granitemoehybrid": (
        {
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "position_embedding_type": "rope",
        },
        r"layers 0, 2 \(linear_attention\) keep state outside",
    ),
}
RAW = {
    "jetmoe": ({"kv_channels": 32, "num_local_experts": 2, "num_experts_per_tok": 1}, "attends with queries"),
    "nemotron": ({}, "does not hand keyword arguments on to its attention"),
    "xmod": ({"is_decoder": True}, "its own forward raises ValueError"),
}


def build(model_type: str, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **SMALL | settings), attn_implementation="eager"
    )
    for weight in model.parameters():
        if weight.dim() >= 2:
            weight.data.mul_(4)
    return model.eval().requires_grad_(False)


def engine_of(
    model: PreTrainedModel, *, numerics: str = "invariant", plan: str = "off", capacity: int = 100
) -> Engine:
    fixed = {"tree16": {"num_nodes": 16, "depth": 4, "branching": 2}, "off": {"num_nodes": 0}}[plan]
    return build_engine(
        model,
        model if plan != "off" else None,
        engine=EngineConfig(device="cpu", numerics=numerics, max_running_samples=4),
        speculation=SpeculationConfig(policy="fixed", **fixed),
        max_total_tokens=capacity,
    )


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("model_type", STATE_ELSEWHERE)
def test_state_outside_attention_is_refused_and_its_layers_named(model_type: str, numerics: str) -> None:
    settings, message = STATE_ELSEWHERE[model_type]
    with pytest.raises(ModelError, match=message) as raised:
        engine_of(build(model_type, **settings), numerics=numerics)
    assert "fast" not in str(raised.value)


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("model_type", RAW)
def test_what_raised_or_corrupted_memory_is_one_clear_error(model_type: str, numerics: str) -> None:
    settings, message = RAW[model_type]
    with pytest.raises(ModelError, match=message):
        engine_of(build(model_type, **settings), numerics=numerics)


def test_cells_take_no_keys_of_another_shape() -> None:
    shape = KVShape(num_layers=1, num_kv_heads=2, num_heads=4, head_size=16)
    pool = KVPool(shape, num_slots=1, capacity=32, dtype=torch.float32, device=torch.device("cpu"))
    attention = own_backend().attention
    segments = segments_of(pool, slots=np.array([0]), counts=np.array([3]), starts=np.array([0]))
    for wrong in (torch.ones(3, 2, 4, 32), torch.ones(3, 4, 4, 16)):
        if isinstance(attention, PoolAttention):
            with pytest.raises(ModelError, match="do not fit a cache laid out for 2 heads of 16"):
                attention.store(pool, 0, wrong, segments)
        with pytest.raises(ModelError, match="do not fit a cache"):
            pool.write(0, torch.arange(3), wrong[:, :, -2:])
    assert not pool.cells.any()


@pytest.mark.parametrize("weight", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(weight: str, value: float) -> None:
    model = build("llama")
    model.get_parameter(weight).data[3] = value
    with pytest.raises(NotFiniteError, match=weight):
        engine_of(model)


@pytest.mark.parametrize("capacity", [40, 100, 300])
@pytest.mark.parametrize(
    ("model_type", "heads", "kv_heads", "hidden"),
    [("olmo2", 2, 1, 20), ("llama", 6, 2, 60), ("llama", 3, 1, 36), ("qwen3", 4, 2, 48)],
)
def test_head_sizes_of_no_whole_vectors_are_invariant(model_type, heads, kv_heads, hidden, capacity) -> None:
    """Sizes 10 and 12: the cache's cells are filled up to whole vectors, so our own code attends."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": hidden}
    model = build(model_type, **sizes, **({"head_dim": 12} if model_type == "qwen3" else {}))
    requests = [
        SampleRequest(
            key=SampleKey(run_seed=1, sample_index=index),
            prompt=Prompt(prompt_id=index, token_ids=np.arange(3 + 2 * index) * 7 % 64),
            sampling=SamplingParams(max_new_tokens=20),
        )
        for index in range(4)
    ]
    plain = engine_of(model, capacity=capacity).generate(requests)
    drafted = engine_of(model, capacity=capacity, plan="tree16").generate(requests[::-1])[::-1]
    for one, other in zip(plain, drafted, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.policy_logprobs.tobytes() == other.policy_logprobs.tobytes()


def test_rounding_is_told_from_being_wrong_where_distributions_are_flat() -> None:
    model = build("llama")
    flat = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 1e-4
    assert is_rounding(flat, flat * (1 + 1e-6), model)
    # total variation would see nothing
    assert not is_rounding(flat, flat.flip(-1), model)
    assert not is_rounding(flat, flat * float("nan"), model)


def test_a_model_of_few_positions_is_compared_within_them_and_served_no_further() -> None:
    model = build("gpt2", num_key_value_heads=4, n_positions=24)
    assert engine_of(model, capacity=24).num_running == 0
    with pytest.raises(ModelError, match="context is 24"):
        engine_of(model, capacity=25)


@pytest.mark.parametrize("batch", [1, 4])
def test_positions_counted_by_padding_tokens_are_refused(batch: int) -> None:
    """RoBERTa's kin: positions begin behind the padding id, which is the first id of all."""
    model = build("roberta", is_decoder=True, num_key_value_heads=4, max_position_embeddings=128)
    with pytest.raises(ModelError, match="differ from its own forward's"):
        build_engine(
            model,
            None,
            engine=EngineConfig(device="cpu", max_running_samples=batch),
            speculation=SpeculationConfig(policy="off"),
            max_total_tokens=60,
        )


def test_stacked_experts_promise_no_bits_and_serve_fast() -> None:
    model = build("mixtral", num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    with pytest.raises(
        NumericsError, match=r"layers\.0\.mlp\.\S+ is multiplied by outside .*set engine\.numerics=fast"
    ):
        engine_of(model)
    assert engine_of(model, numerics="fast").num_running == 0


@pytest.mark.parametrize(
    ("model_type", "other"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}}),
        ("gemma2", {"attn_logit_softcapping": 1.0}),
    ],
)
def test_a_greedy_continuation_is_told_from_one_by_another_config(model_type: str, other: dict[str, Any]):
    prompt = np.arange(3, 19, dtype=np.int64)
    request = SampleRequest(
        key=SampleKey(run_seed=0, sample_index=0),
        prompt=Prompt(prompt_id=0, token_ids=prompt),
        sampling=SamplingParams(temperature=0.0, max_new_tokens=16),
        group_id=0,
    )
    (said,) = engine_of(build(model_type)).generate([request])
    assert continuation_fault(build(model_type), prompt, said.token_ids, said.policy_logprobs) is None
    fault = continuation_fault(build(model_type, **other), prompt, said.token_ids, said.policy_logprobs)
    assert fault is not None and "own forward takes" in fault
