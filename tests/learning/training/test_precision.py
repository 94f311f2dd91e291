"""Precision: float32 weights under the optimizer, products in bfloat16, published in the type they came in."""

import copy
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings.trainer import LoraConfig
from rlhfspec.engine.weights.chunks import pack_weights, unpack_weights
from rlhfspec.learning.training.finished_model import PublishedForm
from rlhfspec.learning.training.learner import Learner
from rlhfspec.learning.training.training_forward import (
    autocast,
    compute_dtype_on,
    hold_linears_in,
    require_master_weights,
)

GRPO = AlgorithmConfig(kind="grpo", kl_coef=0.0)
ONE_STEP = TrainerConfig(learning_rate=1e-6, minibatch_size=6)


def test_a_cpu_computes_in_float32_and_a_gpu_in_what_it_has_instructions_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert compute_dtype_on(cpu, torch.bfloat16) == torch.float32
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=native: has)
        assert compute_dtype_on(gpu, torch.bfloat16) == expected
    assert compute_dtype_on(gpu, torch.float32) == torch.float32


def test_bfloat16_is_taken_where_it_is_wanted_and_there_and_refused_elsewhere_by_what_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    assert compute_dtype_on(cpu, torch.bfloat16, "float32") == torch.float32
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: True)
        assert compute_dtype_on(cpu, torch.float32, "bfloat16") == torch.bfloat16
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    # what ATEN_CPU_CAPABILITY=avx2 makes of a processor that has them
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with pytest.raises(ConfigError, match=r"compute_dtype is bfloat16.* found .*, AVX2; set it to auto"):
        compute_dtype_on(cpu, torch.float32, "bfloat16")


def demo_size_model(*, tied: bool = False) -> LlamaForCausalLM:
    """The demo target's shape, its weights bfloat16 numbers."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=48,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            pad_token_id=0,
            initializer_range=0.06,
        )
    )
    return model.bfloat16().float().eval()


def learner_of(model: LlamaForCausalLM, **settings) -> Learner:
    arguments = {"algorithm": GRPO, "trainer": ONE_STEP, "temperature": 1.0, "seed": 0, "pad_token_id": 0}
    return Learner(model, **(arguments | settings))


def share_moved(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    moved = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    return moved / sum(tensor.numel() for tensor in before)


@pytest.fixture
def form():
    """How a bfloat16 model is published."""
    manifest, _ = pack_weights(demo_size_model().bfloat16(), name="target", weight_version=0)
    return PublishedForm(manifest)


def test_small_steps_move_the_float32_weights_and_add_up_in_the_published_bfloat16(form, make_rollouts):
    learner = learner_of(demo_size_model())
    rollouts = make_rollouts(learner.model, group_size=6)

    def published():
        return [tensor.to(form.dtypes[name], copy=True) for name, tensor in learner.weights()]

    def masters():
        return [parameter.detach().clone() for parameter in learner.model.parameters()]

    first, first_masters = published(), masters()
    learner.update(rollouts)
    early = share_moved(first, published())
    assert share_moved(first_masters, masters()) > 0.95
    assert early < 0.1, "one step is below half a unit of most bfloat16 weights"
    for _ in range(29):
        learner.update(rollouts)
    assert share_moved(first, published()) > 5 * early


def test_what_adamw_in_plain_bfloat16_would_have_moved():
    """The other half of the law: where the weights themselves are bfloat16, thirty such steps are lost."""
    weight = torch.nn.Parameter(demo_size_model().model.layers[0].mlp.up_proj.weight.detach().bfloat16())
    before = weight.detach().clone()
    optimizer = torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0)
    weight.grad = torch.ones_like(weight)
    for _ in range(30):
        optimizer.step()
    assert share_moved([before], [weight.detach()]) < 0.1


def test_an_optimizer_over_bfloat16_weights_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"in bfloat16, where most steps round to nothing"):
        learner_of(demo_size_model().bfloat16())
    require_master_weights(demo_size_model().bfloat16().requires_grad_(False))


def test_products_in_bfloat16_leave_the_weights_float32_and_the_ratio_near_one(make_rollouts):
    model = demo_size_model()
    rollouts = make_rollouts(model)
    learner = learner_of(
        model,
        algorithm=AlgorithmConfig(kind="ppo"),
        trainer=TrainerConfig(learning_rate=1e-3, minibatch_size=3),
        compute_dtype=torch.bfloat16,
    )
    metrics = learner.update(rollouts).metrics
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert abs(metrics["ratio_at_first_minibatch"] - 1.0) < 0.1
    assert metrics["ratio_at_first_minibatch"] != 1.0, "bfloat16 products round"
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("tied", [False, True])
def test_linears_held_in_bfloat16_give_the_bits_that_autocast_gives(tied):
    model = demo_size_model(tied=tied)
    held = copy.deepcopy(model).requires_grad_(False)
    hold_linears_in(held, torch.bfloat16)
    assert held.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert (held.lm_head.weight.dtype == torch.float32) == tied
    ids = torch.randint(2, 48, (2, 20))
    with torch.no_grad(), autocast(torch.device("cpu"), torch.bfloat16):
        assert torch.equal(model(ids).logits, held(ids).logits)


def test_frozen_weights_that_bfloat16_would_round_stay_as_they_came(make_rollouts):
    model = demo_size_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight += 1e-4
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rollouts = make_rollouts(model, group_size=6)
    lora = TrainerConfig(lora=LoraConfig(rank=2), learning_rate=1e-3, minibatch_size=6)
    learner = learner_of(model, trainer=lora, compute_dtype=torch.bfloat16)
    assert all(torch.equal(tensor.float(), before[name]) for name, tensor in learner.weights())
    held = {parameter.dtype for parameter in model.model.layers[0].mlp.parameters()}
    assert torch.bfloat16 in held, "those that it would not are held in it"
    learner.update(rollouts)
    moved = dict(learner.weights())["model.layers.1.mlp.up_proj.weight"]
    assert not torch.equal(moved, before["model.layers.1.mlp.up_proj.weight"])


def test_a_model_is_published_as_it_came(form):
    weights = list(learner_of(demo_size_model()).weights())
    packer = form.packer(3)
    chunks = [chunk.copy() for chunk in packer.chunks(weights)]
    manifest = packer.manifest()
    assert manifest.checksum == form.first.checksum == form.checksum(weights)
    assert (manifest.weight_version, manifest.hf_config_json) == (3, form.first.hf_config_json)
    assert {tensor.dtype for tensor in unpack_weights(manifest, chunks).values()} == {torch.bfloat16}
