"""Attention in our own code: the formula, and bits that depend on nothing else in the batch."""

import pytest
import torch
from torch import Tensor

from engine.attention import own_attention, reference_attention


def case(*, num: int, rows: int, view: int, size: int, bias_rows: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(view + size)
    pool = torch.randn(2, num, view + 32, size, generator=random)
    seen = torch.rand(num, bias_rows, view, generator=random) < 0.6
    seen[..., 0] = True
    return {
        "q": torch.randn(num, rows, size, generator=random),
        # views of a pool: what lies behind a sample's view belongs to it too
        "keys": pool[0, :, :view],
        "values": pool[1, :, :view],
        "bias": torch.zeros(seen.shape).masked_fill(~seen, float("-inf")),
    }


@pytest.mark.parametrize("size", [8, 16, 64, 72, 128])
@pytest.mark.parametrize(("rows", "bias_rows"), [(1, 1), (4, 1), (9, 9)])
def test_it_equals_the_reference(size: int, rows: int, bias_rows: int) -> None:
    inputs = case(num=5, rows=rows, view=96, size=size, bias_rows=bias_rows)
    out = own_attention(**inputs, rows=rows, scaling=size**-0.5)
    expected = reference_attention(**inputs, rows=rows, scaling=size**-0.5, softcap=None)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_one_bias_may_serve_all_and_queries_may_lie_apart() -> None:
    inputs = case(num=4, rows=3, view=64, size=16, bias_rows=3)
    inputs["bias"] = inputs["bias"][:1]
    lanes = torch.randn(4, 5, 16)
    lanes[:, :3] = inputs["q"]
    inputs["q"] = lanes[:, :3]
    out = own_attention(**inputs, rows=3, scaling=0.25)
    expected = reference_attention(**inputs, rows=3, scaling=0.25, softcap=None)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_company_view_and_decoys_change_no_bit() -> None:
    inputs = case(num=6, rows=4, view=160, size=64, bias_rows=4)
    inputs["bias"][..., 100:] = float("-inf")
    together = own_attention(**inputs, rows=4, scaling=0.125)
    alone = own_attention(**{name: x[2:3] for name, x in inputs.items()}, rows=4, scaling=0.125)
    assert torch.equal(alone, together[2:3])
    fewer = own_attention(**inputs, rows=2, scaling=0.125)
    assert torch.equal(fewer, together[:, :2])
    shorter = {name: x[:, :104] for name, x in inputs.items() if name in ("keys", "values")}
    short = own_attention(inputs["q"], **shorter, bias=inputs["bias"][..., :104], rows=4, scaling=0.125)
    assert torch.equal(short, together)


def test_tokens_may_lie_anywhere_as_long_as_their_order_stays() -> None:
    """A node behind decoys and its dense position after them give the same bits."""
    inputs = case(num=2, rows=1, view=64, size=32, bias_rows=1)
    inputs["bias"] = torch.full((2, 1, 64), float("-inf"))
    inputs["bias"][..., :20] = 0.0
    dense = own_attention(**inputs, rows=1, scaling=0.2)
    places = torch.sort(torch.randperm(64, generator=torch.Generator().manual_seed(1))[:20]).values
    spread = {name: torch.randn(2, 96, 32) for name in ("keys", "values")}
    bias = torch.full((2, 1, 96), float("-inf"))
    bias[..., places] = 0.0
    for name, cells in spread.items():
        cells[:, places] = inputs[name][:, :20]
    assert torch.equal(own_attention(inputs["q"], **spread, bias=bias, rows=1, scaling=0.2), dense)
