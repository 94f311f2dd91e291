"""Every tensor of an adapted model is merged, whole, or refused by name: what is published is what was learned."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from peft import LoraConfig as Recipe
from peft import PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings.trainer import LoraConfig
from rlhfspec.engine.weights.chunks import load_into, unique_tensors
from rlhfspec.learning.training import adapter_merge
from rlhfspec.learning.training.adapter import Adapter, count_adapter_params
from rlhfspec.learning.training.adapter_merge import merged_tensors

IDS = torch.arange(2, 34)[None]
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def dense(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied, attention_bias=True)).eval()


def mixture(**_: bool) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, tie_word_embeddings=False)).eval()


def moved(model) -> None:
    """Everything that learns has learned; what two modules share, once."""
    generator, seen = torch.Generator().manual_seed(3), set()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.data_ptr() not in seen:
                seen.add(parameter.data_ptr())
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def logits_of(model):
    with torch.no_grad():
        return model(IDS).logits


def published(model):
    return {name: tensor.clone() for name, tensor in merged_tensors(model, unique_tensors(model))}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        {"lora_bias": True},
        {"bias": "all"},
        {"use_dora": True},
        {"use_rslora": True, "rank_pattern": {"q_proj": 2}},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "mica"},
        {"trainable_token_indices": [3, 40]},
        {"modules_to_save": ["norm", "mlp"]},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        {"target_parameters": ["mlp.up_proj.weight", "mlp.down_proj.weight"]},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_merged_is_what_the_adapted_model_computes(more, tied):
    recipe = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | more
    adapted = get_peft_model(dense(tied=tied), Recipe(**recipe))
    start = logits_of(adapted)
    moved(adapted)
    before = deepcopy(adapted.state_dict())
    fresh = dense(tied=tied)
    load_into(fresh, published(adapted.get_base_model()))
    torch.testing.assert_close(logits_of(fresh), logits_of(adapted), atol=2e-6, rtol=0.0)
    assert (logits_of(adapted) - start).abs().max() > 0.05
    after = adapted.state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items()), "merging changes nothing"


@pytest.mark.parametrize(
    ("make", "targets"),
    [
        (mixture, "all-linear"),
        (mixture, ("q_proj", "gate_proj", "up_proj", "down_proj")),
        (dense, ("q_proj", "embed_tokens")),
        (dense, ("embed_tokens", "lm_head")),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_experts_and_embeddings_are_merged_and_peft_loads_the_adapter(make, targets, tmp_path):
    model = make()
    adapter = Adapter(model, LoraConfig(rank=4, targets=targets), seed=0)
    assert adapter.num_params() > 0
    moved(model)
    fresh, reference = make(), make()
    load_into(fresh, {name: one.clone() for name, one in adapter.merged_tensors(unique_tensors(model))})
    torch.testing.assert_close(logits_of(fresh), logits_of(model), atol=5e-6, rtol=0.0)
    load_into(reference, {name: one.clone() for name, one in adapter.base_tensors(unique_tensors(model))})
    with adapter.switched_off():
        assert torch.equal(logits_of(model), logits_of(reference))
    assert (logits_of(model) - logits_of(reference)).abs().max() > 0.05
    for name, content in adapter.files(unique_tensors(model), base_model="base").items():
        (tmp_path / name).write_bytes(content)
    torch.testing.assert_close(
        logits_of(PeftModel.from_pretrained(make(), tmp_path)), logits_of(model), atol=1e-6, rtol=0.0
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_experts_are_counted_without_memory():
    with torch.device("meta"):
        shapes = mixture()
    settings = LoraConfig(rank=4)
    assert count_adapter_params(shapes, settings) == Adapter(mixture(), settings, seed=0).num_params()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, "changes model.embed_tokens.weight, whose weight"),
        ({"target_modules": ["q_proj", "lm_head"]}, "changes lm_head.weight, whose weight is also that of"),
        ({"modules_to_save": ["lm_head"]}, "changes lm_head.weight"),
        ({"kasa_config": {}}, "'lora_diag', which cannot be taken into account; KaSA"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_merged_is_refused_before_it_learns(more, message):
    if "kasa_config" in more:
        from peft import KasaConfig

        more = {"kasa_config": KasaConfig()}
    recipe = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | more
    adapted = get_peft_model(dense(tied=True), Recipe(**recipe)).get_base_model()
    with pytest.raises(ConfigError, match=message):
        published(adapted)


def test_another_adapter_that_learns_is_named():
    adapted = get_peft_model(dense(), Recipe(r=2, target_modules=["q_proj"]))
    adapted.add_adapter("second", Recipe(r=2, target_modules=["k_proj"]))
    adapted.base_model.set_adapter(["default", "second"])
    with pytest.raises(ConfigError, match=r"k_proj\.lora_A\.second\.weight learns and is no part of"):
        published(adapted.get_base_model())


def test_a_weight_that_is_not_given_is_named():
    adapted = get_peft_model(dense(), Recipe(r=2, target_modules=["q_proj"])).get_base_model()
    given = [(name, one) for name, one in unique_tensors(adapted) if "layers.1.self_attn.q_proj" not in name]
    with pytest.raises(
        ConfigError, match=r"changes model\.layers\.1\.self_attn\.q_proj.*not among the tensors"
    ):
        dict(merged_tensors(adapted, given))


def test_an_adapter_that_is_frozen_is_named():
    model = dense()
    adapter = Adapter(model, LoraConfig(rank=2, targets=("q_proj",)), seed=0)
    model.model.layers[1].self_attn.q_proj.lora_B["default"].weight.requires_grad_(False)
    with pytest.raises(
        ConfigError, match=r"adapter of model\.layers\.1\.self_attn\.q_proj and of 0 more.*frozen"
    ):
        adapter.merged_tensors(unique_tensors(model))


def test_a_listed_target_that_no_module_has_is_named_beside_those_there_are():
    told = r"no module of it is named FAKE or v_prj; name linear layers of it \(down_proj, .*v_proj\)"
    with torch.device("meta"), pytest.raises(ConfigError, match=told):
        count_adapter_params(dense(), LoraConfig(targets=("q_proj", "layers.1.mlp.up_proj", "v_prj", "FAKE")))
    adapted = get_peft_model(dense(), Recipe(r=2, target_modules=["q_proj", "1.mlp.up_proj", "v_prj"]))
    assert adapter_merge.idle_targets(adapted, "default") == ["v_prj"]
    assert (
        adapter_merge.idle_targets(get_peft_model(dense(), Recipe(target_modules=".*q_proj")), "default")
        == []
    )


def test_kinds_of_layers_that_are_merged_exist_in_peft():
    import peft.tuners.lora.layer as layers
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    known = {TrainableTokensLayer.__name__, *vars(layers)}
    assert known >= adapter_merge._KINDS


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_a_bias_that_no_weight_of_the_model_has_room_for_is_refused():
    model = get_peft_model(dense(), Recipe(target_modules=["down_proj"], lora_bias=True, r=2))
    with pytest.raises(ConfigError, match=r"down_proj has a bias \(lora_bias\) and its weight has none"):
        published(model)
