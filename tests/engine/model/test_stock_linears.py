"""A stock module with our own products: the same function, the same weights, and no row that sees another."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rlhfspec.engine.model.linears import MatrixLinear
from rlhfspec.engine.model.stock_forward import OwnProduct, StockForward, with_own_products
from rlhfspec.engine.weights.chunks import unique_tensors
from tests.helpers.backends import OWN_LAYOUTS, stock_products

GPT2 = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
OPT = {"vocab_size": 64, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def model_of(kind: str, settings: dict, dtype: torch.dtype = torch.float32):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=dtype)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "settings"), [("gpt2", GPT2), ("opt", OPT | {"word_embed_proj_dim": 64})], ids=["gpt2", "opt"]
)
def test_the_copy_computes_the_same_and_leaves_the_model_as_it_was(kind: str, settings: dict) -> None:
    model = model_of(kind, settings)
    names = [type(module).__name__ for module in model.modules()]
    ids = torch.randint(64, (2, 11))
    expected = model(ids).logits
    served = with_own_products(model, MatrixLinear)
    assert [type(module).__name__ for module in model.modules()] == names
    assert sum(isinstance(module, OwnProduct) for module in served.modules()) > 6
    assert not any(type(module) is nn.Linear for module in served.modules())
    torch.testing.assert_close(served(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_what_is_no_linear_is_shared() -> None:
    model = model_of("gpt2", GPT2)
    served = with_own_products(model, MatrixLinear)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in served.parameters()} <= own
    assert served.transformer.wte.weight is model.transformer.wte.weight
    assert served.lm_head.weight is model.lm_head.weight, "a linear's weight can still be asked for"


@pytest.mark.parametrize("lay_out", OWN_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_alone_and_together_are_the_same_bits(dtype: torch.dtype, lay_out: type) -> None:
    linear = nn.Linear(96, 40).to(dtype)
    product = OwnProduct(linear, lay_out)
    x = torch.randn(33, 96).to(dtype)
    together = product(x)
    assert together.dtype == dtype and together.shape == (33, 40)
    for rows in (1, 2, 5, 16):
        assert torch.equal(product(x[:rows]), together[:rows])
    assert torch.equal(product(x.view(3, 11, 96)), together.view(3, 11, 40))
    torch.testing.assert_close(together, linear(x), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


def test_new_weights_are_followed() -> None:
    model = model_of("opt", OPT | {"word_embed_proj_dim": 64})
    forward = StockForward(model, stock_products())
    other = copy.deepcopy(model)
    for weight in other.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.1)
    tensors = dict(unique_tensors(other))
    assert forward.load(tensors, [tensors]) is None
    ids = torch.randint(64, (1, 9))
    served = forward._model
    served.set_attn_implementation("eager")
    torch.testing.assert_close(served(ids).logits, other(ids).logits, rtol=1e-4, atol=1e-4)
