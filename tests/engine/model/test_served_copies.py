"""What decodes is what was loaded: a bit flipped in any laid-out copy is found and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from rlhfspec.core.errors import WeightsError
from rlhfspec.engine.model.linears import PrepackedLinear, Rows, first_altered, same_bits, together
from rlhfspec.engine.model.llama_forward import LlamaForward
from rlhfspec.engine.model.llama_model import LlamaModel
from rlhfspec.engine.model.runner import ModelRunner
from rlhfspec.engine.model.stock_forward import OwnProduct
from rlhfspec.engine.weights.chunks import unique_tensors
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


def layouts_of(model: LlamaModel) -> dict[str, Tensor]:
    """Every tensor that a model of ours holds."""
    found: dict[str, Tensor | None] = {"embedding": model.embedding, "norm": model.final_norm}
    found["final gain"] = model.final_gain
    found |= tensors_of("head", model.head)
    for index, layer in enumerate(model.layers):
        for name in ("qkv", "out", "gate_up", "down"):
            found |= tensors_of(f"layer {index} {name}", getattr(layer, name))
        for name in ("attention_gain", "head_gain", "mlp_gain"):
            found[f"layer {index} {name}"] = getattr(layer, name)
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def made_of_them(forward: LlamaForward) -> dict[str, Tensor]:
    """Every tensor that a forward keeps beside its model."""
    found: dict[str, Tensor | None] = {"rope": forward._rope, "rotations": forward._rotations}
    if (fused := forward.fused) is not None:
        found["final gain"] = fused._final_gain  # type: ignore[attr-defined]
        for index, layer in enumerate(fused._layers):  # type: ignore[attr-defined]
            for name in ("attention_gain", "head_gain", "mlp_gain"):
                found[f"layer {index} {name}"] = getattr(layer, name)
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def tensors_of(name: str, linear: object) -> dict[str, Tensor]:
    return {f"{name}.{field}": value for field, value in vars(linear).items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("backend", [own_backend, torch_backend])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_bit_flipped_in_a_layout_of_ours_is_found(kind, dtype, backend) -> None:
    module = model_of(kind, dtype)
    forward, tensors = runner_of(module, backend=backend())._forward, dict(unique_tensors(module))
    assert isinstance(forward, LlamaForward)
    layouts, beside = layouts_of(forward.model), made_of_them(forward)
    assert len(layouts) >= 11
    for checked, altered in (
        (layouts, lambda: forward.model.altered_copy(tensors)),
        (beside, forward.altered_copy),
    ):
        for name, tensor in checked.items():
            for where in (0, 1001, -8):
                flip(tensor, where)
                assert altered() is not None, name
                flip(tensor, where)
        assert altered() is None


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_bit_flipped_in_a_product_of_the_stock_module_is_found(kind: str) -> None:
    forward = runner_of(model_of(kind), stock=True, backend=stock_products())._forward
    served: Module = forward._model  # type: ignore[attr-defined]
    products = {name: module for name, module in served.named_modules() if isinstance(module, OwnProduct)}
    assert len(products) > 8
    for name, product in products.items():
        for tensor in tensors_of(name, product._product).values():
            flip(tensor, 1001)
            assert forward.altered_copy() == name
            flip(tensor, 1001)
    assert forward.altered_copy() is None


def test_a_norm_that_the_stock_module_no_longer_shares_is_found() -> None:
    forward = runner_of(model_of("llama"), stock=True, backend=stock_products())._forward
    norm = forward._model.model.norm  # type: ignore[attr-defined]
    norm.weight = torch.nn.Parameter(norm.weight.clone(), requires_grad=False)
    assert forward.altered_copy() is None
    flip(norm.weight, 8)
    assert forward.altered_copy() == "model.norm.weight"


@pytest.mark.parametrize("stock", [False, True])
def test_what_is_laid_out_wrong_is_found_when_it_is_loaded(monkeypatch, stock: bool) -> None:
    module = model_of("llama")
    runner, tensors = runner_of(module, stock=stock, backend=stock_products()), dict(unique_tensors(module))
    for kind in LAYOUTS:
        monkeypatch.setattr(kind, "take", lambda self, rows, bias: None)
    runner.load(tensors)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"] * 1.5
    with pytest.raises(
        WeightsError, match=r"^the model: the copy of .*(gate_up|up_proj) that decodes was expected"
    ):
        runner.load(tensors)
    monkeypatch.undo()
    runner.load(tensors)


def test_a_tensor_damaged_on_its_way_to_the_device_is_found(monkeypatch) -> None:
    module = model_of("llama")
    runner, tensors = runner_of(module, backend=stock_products()), dict(unique_tensors(module))
    # what lies elsewhere is stood in for by tensors without numbers
    elsewhere = {name: tensor.to("meta") for name, tensor in tensors.items()}
    arriving = {id(elsewhere[name]): tensor.clone() for name, tensor in tensors.items()}
    damaged = [id(elsewhere["model.layers.1.mlp.up_proj.weight"])]

    def read(self: LlamaModel, tensor: torch.Tensor, part: tuple[slice, ...]) -> torch.Tensor:
        got = arriving[id(tensor)][part].clone()
        if id(tensor) in damaged:
            damaged.clear()
            flip(got, 1001)
        return got

    monkeypatch.setattr(LlamaModel, "_read", read)
    with pytest.raises(WeightsError, match=r"the copy of layer 1 gate_up that decodes was expected"):
        runner.load(elsewhere)
    runner.load(elsewhere)


@pytest.mark.parametrize("stock", [False, True])
def test_a_version_that_ends_early_is_refused(stock: bool) -> None:
    module = model_of("llama")
    runner, tensors = runner_of(module, stock=stock, backend=stock_products()), dict(unique_tensors(module))
    missing = "model.layers.1.mlp.up_proj.weight"
    came = [{name: tensor} for name, tensor in tensors.items() if name != missing]
    with pytest.raises(WeightsError, match=rf"ended early: 1 names differ, first '{missing}'"):
        runner.load_parts(tensors, came)
    runner.load_parts(tensors, [*came, {missing: tensors[missing]}])


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("columns", [96, 99])
def test_a_linear_holds_what_it_was_made_of_and_nothing_else(kind: Callable, columns: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(columns, 64, generator=generator)
    bias = torch.randn(columns, generator=generator)
    linear, unbiased = kind(weight.clone(), bias.clone()), kind(weight.clone(), None)
    rows = Rows((weight,))
    assert linear.holds(rows, bias) and unbiased.holds(rows, None)
    assert not linear.holds(rows, None) and not unbiased.holds(rows, bias)
    for tensor, where in ((weight, 0), (weight, -4), (weight, 4 * 1000), (bias, -4)):
        flip(tensor, where)
        assert not linear.holds(rows, bias)
        flip(tensor, where)
    assert linear.holds(rows, bias)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 64), (99, 100), (33, 7)])
def test_rows_in_another_order_times_a_gain_are_taken(kind: Callable, dtype: torch.dtype, shape) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=generator).to(dtype)
    gain = torch.randn(shape[1], generator=generator) if dtype == torch.float32 else None
    rows = Rows((weight[:10], weight[10:]), torch.randperm(shape[0], generator=generator), gain)
    # oneDNN's layout is asked for in the type that an engine computes in on this processor
    laid_in = torch_backend().compute_dtype(dtype) if kind is PrepackedLinear else dtype
    linear = kind(torch.zeros_like(weight, dtype=laid_in), None)
    assert not linear.holds(rows, None)
    linear.take(rows, None)
    assert linear.holds(rows, None) and torch.equal(linear.unpacked()[0], rows.dense().to(laid_in))
    for name, laid_out in tensors_of("", kind(rows.dense().to(laid_in), None)).items():
        mine = tensors_of("", linear)[name]
        assert mine.is_mkldnn or torch.equal(mine, laid_out)


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
