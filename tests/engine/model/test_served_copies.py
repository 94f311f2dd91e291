"""What decodes is what was loaded: a bit flipped in any laid-out copy is found and named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from rlhfspec.core.errors import WeightsError
from rlhfspec.engine.model.linears import first_altered, same_bits, together
from rlhfspec.engine.model.llama_forward import LlamaForward
from rlhfspec.engine.model.runner import ModelRunner
from rlhfspec.engine.model.stock_linears import OwnProduct
from tests.helpers.backends import LAYOUTS, own_backend, stock_products, torch_backend
from tests.helpers.devices import DEVICES

FAMILIES = ("llama", "qwen2", "qwen3")
"Of the second the attention has biases, of the third the heads have gains."


def model_of(kind: str, dtype: torch.dtype = torch.float32, **settings: int) -> PreTrainedModel:
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 60}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    if kind == "gpt2":
        sizes, heads = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 60}, {}
    config = AutoConfig.for_model(kind, **(sizes | heads | settings))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight) * 0.01)
    return model


def runner_of(model: PreTrainedModel, **options: Any) -> ModelRunner:
    options = {"backend": own_backend()} | options
    return ModelRunner(model, num_slots=2, capacity=64, vocab_size=60, **options)


def flip(tensor: Tensor, where: int) -> None:
    """Flip the lowest bit of one number: a change that no comparison of logits sees."""
    memory = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    words = memory.untyped_storage()
    words[where % len(words) // memory.element_size() * memory.element_size()] ^= 1


def copies_of(model: PreTrainedModel, forward: LlamaForward) -> dict[str, Tensor]:
    """Every tensor that a forward of ours reads and that is no memory of the module."""
    fused = forward.fused
    found = {"embedding": forward._embedding, "rope": forward._rope, "rotations": forward._rotations}
    found |= tensors_of("head", forward._head)
    for index, layer in enumerate(forward._layers):
        for name in ("qkv", "out", "gate_up", "down"):
            found |= tensors_of(f"layer {index} {name}", getattr(layer, name))
        for name in ("attention_gain", "head_gain", "mlp_gain"):
            found[f"layer {index} {name}"] = getattr(layer, name)
            if fused is not None:
                found[f"layer {index} fused {name}"] = getattr(fused._layers[index], name)
    found["final gain"] = forward._final_gain
    if fused is not None:
        found["fused final gain"] = fused._final_gain
    own = {tensor.data_ptr() for tensor in model.parameters()}
    return {
        name: tensor for name, tensor in found.items() if tensor is not None and tensor.data_ptr() not in own
    }


def tensors_of(name: str, linear: object) -> dict[str, Tensor]:
    return {f"{name}.{field}": value for field, value in vars(linear).items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("backend", [own_backend, torch_backend])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_bit_flipped_in_a_copy_of_our_forward_is_found(kind, dtype, backend) -> None:
    model = model_of(kind, dtype)
    runner = runner_of(model, backend=backend())
    forward = runner._forward
    assert isinstance(forward, LlamaForward)
    runner.require_copies_hold()
    copies = copies_of(model, forward)
    assert len(copies) >= 11
    for tensor in copies.values():
        for where in (0, 1001, -8):
            flip(tensor, where)
            with pytest.raises(WeightsError, match=" that decodes was expected to hold"):
                runner.require_copies_hold()
            flip(tensor, where)
    runner.require_copies_hold()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_bit_flipped_in_a_product_of_the_stock_module_is_found(kind: str) -> None:
    runner = runner_of(model_of(kind), stock=True, backend=stock_products())
    runner.require_copies_hold()
    served: Module = runner._forward._model  # type: ignore[attr-defined]
    products = {name: module for name, module in served.named_modules() if isinstance(module, OwnProduct)}
    assert len(products) > 8
    for name, product in products.items():
        for tensor in tensors_of(name, product._product).values():
            flip(tensor, 1001)
            with pytest.raises(WeightsError, match=f"copy of {name} that"):
                runner.require_copies_hold()
            flip(tensor, 1001)
    runner.require_copies_hold()


def test_a_norm_that_the_stock_module_no_longer_shares_is_found() -> None:
    runner = runner_of(model_of("llama"), stock=True, backend=stock_products())
    norm = runner._forward._model.model.norm  # type: ignore[attr-defined]
    norm.weight = torch.nn.Parameter(norm.weight.clone(), requires_grad=False)
    runner.require_copies_hold()
    flip(norm.weight, 8)
    with pytest.raises(WeightsError, match=r"copy of model\.norm\.weight that"):
        runner.require_copies_hold()


def test_weights_that_were_loaded_and_not_laid_out_are_found() -> None:
    for stock in (False, True):
        model = model_of("llama")
        runner = runner_of(model, stock=stock, backend=stock_products())
        tensors = dict(copy.deepcopy(model).state_dict())
        tensors["model.layers.1.mlp.up_proj.weight"].mul_(1.5)
        model.load_state_dict(tensors)
        with pytest.raises(WeightsError, match=r"gate_up|up_proj"):
            runner.require_copies_hold()
        runner._forward.reload()
        runner.require_copies_hold()


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("columns", [96, 99])
def test_a_linear_holds_what_it_was_made_of_and_nothing_else(kind: Callable, columns: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(columns, 64, generator=generator)
    bias = torch.randn(columns, generator=generator)
    linear, unbiased = kind(weight.clone(), bias.clone()), kind(weight.clone(), None)
    assert linear.holds(weight, bias) and unbiased.holds(weight, None)
    assert not linear.holds(weight, None) and not unbiased.holds(weight, bias)
    for tensor, where in ((weight, 0), (weight, -4), (weight, 4 * 1000), (bias, -4)):
        flip(tensor, where)
        assert not linear.holds(weight, bias)
        flip(tensor, where)
    assert linear.holds(weight, bias)


def test_bits_are_compared_and_not_numbers() -> None:
    zero, nan = torch.zeros(3), torch.full((3,), torch.nan)
    assert not same_bits(zero, -zero) and same_bits(nan, nan.clone())
    assert not same_bits(zero, None) and same_bits(None, None)
    assert not same_bits(zero, zero[:2])


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_altered_is_named_after_one_wait(device: str) -> None:
    good, bad = torch.ones(3, device=device), torch.zeros(3, device=device)
    copies = [("first", same_bits(good.clone(), good)), ("none", True), ("second", same_bits(good, bad))]
    assert all(
        isinstance(same, torch.Tensor) == (device == "cuda") for name, same in copies if name != "none"
    )
    assert first_altered(copies) == "second" and first_altered(copies[:2]) is None
    assert first_altered([("whole", together(copies[0][1], copies[2][1]))]) == "whole"
    assert bool(together(True, copies[0][1])) and not together(False, copies[0][1])
    assert same_bits(good, good) is True, "itself"
