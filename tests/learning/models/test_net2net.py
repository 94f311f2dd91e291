"""Growing a model does not change what it computes."""

import torch
from pytest import mark

from rlhfspec.learning.models.net2net import deepen, widen


@mark.parametrize("factor", [2, 3])
def test_widening_keeps_the_logits(model, factor):
    ids = torch.randint(0, 19, (2, 11))
    wide = widen(model, factor=factor).eval()
    assert wide.config.hidden_size == 32 * factor
    assert (wide.config.num_attention_heads, wide.config.num_key_value_heads) == (4 * factor, 2 * factor)
    assert torch.allclose(wide(ids).logits, model(ids).logits, atol=2e-4)


def test_deepening_keeps_the_logits(model):
    ids = torch.randint(0, 19, (2, 11))
    deep = deepen(model, num_layers=5).eval()
    assert deep.config.num_hidden_layers == 5
    assert torch.allclose(deep(ids).logits, model(ids).logits, atol=1e-5)


def test_new_weights_can_learn(model):
    grown = deepen(widen(model), num_layers=4)
    grown(torch.randint(0, 19, (2, 11))).logits.square().sum().backward()
    # new heads of an old layer, and a whole new layer, write through o_proj: both must get a gradient
    old_layer, new_layer = grown.model.layers[0], grown.model.layers[1]
    assert old_layer.self_attn.o_proj.weight.grad[:32, 32:].abs().max() > 0
    assert new_layer.mlp.down_proj.weight.grad.abs().max() > 0
