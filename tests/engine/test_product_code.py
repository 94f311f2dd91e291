"""Our own products: exact to rounding, and the same bits whatever the rows, the strides or the vector width."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.product_code import PANEL, TILE, ProductCode, compile_products, product_code


def panels_of(weight: Tensor) -> Tensor:
    return weight.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()


def run(code: ProductCode, x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
    packed, out = panels_of(weight), torch.full((x.shape[0], weight.shape[0]), torch.nan)
    product = code.product if added is None else code.product_added
    product(
        out.data_ptr(),
        x.data_ptr(),
        packed.data_ptr(),
        None if added is None else added.data_ptr(),
        x.shape[0],
        x.shape[1],
        len(packed),
        out.stride(0),
        x.stride(0),
        0 if added is None else added.stride(0),
    )
    return out


def case(rows: int, depth: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows * depth)
    return (
        torch.randn(rows, depth, generator=random),
        torch.randn(columns, depth, generator=random),
        torch.randn(rows, columns, generator=random),
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 50])
@pytest.mark.parametrize("depth", [1, 7, 64])
def test_products_equal_the_formula(rows: int, depth: int) -> None:
    x, weight, added = case(rows, depth, 48)
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(run(product_code(), x, weight).double(), exact, rtol=1e-5, atol=1e-5)
    both = run(product_code(), x, weight, added).double()
    torch.testing.assert_close(both, exact + added.double(), rtol=1e-5, atol=1e-5)


def test_a_result_is_one_chain_of_fused_multiply_adds() -> None:
    """In order of k and rounded once a term: what every processor computes alike."""
    x, weight, _ = case(2, 200, 16)
    expected = np.zeros((2, 16), dtype=np.float32)
    for k in range(200):
        # a product of two float32 is exact in float64; the sum is rounded there first, which shows once in 2^29
        term = np.outer(x[:, k].double().numpy(), weight[:, k].double().numpy())
        expected = (expected.astype(np.float64) + term).astype(np.float32)
    assert np.array_equal(run(product_code(), x, weight).numpy(), expected)


def test_rows_do_not_see_each_other() -> None:
    x, weight, added = case(3 * TILE + 1, 96, 64)
    alone = [run(product_code(), x[i : i + 1], weight, added[i : i + 1]) for i in range(len(x))]
    for rows in range(1, len(x) + 1):
        assert torch.equal(run(product_code(), x[:rows], weight, added[:rows]), torch.cat(alone[:rows]))


def test_the_vector_width_changes_no_bit() -> None:
    x, weight, added = case(8, 96, 64)
    narrow, wide = compile_products(width=8), compile_products(width=16)
    assert torch.equal(run(narrow, x, weight, added), run(wide, x, weight, added))


def test_rows_may_lie_apart_and_the_result_may_replace_what_is_added() -> None:
    x, weight, added = case(7, 32, 32)
    expected = run(product_code(), x, weight, added)
    apart = torch.full((7, 40), torch.nan)
    apart[:, :32] = x
    assert torch.equal(run(product_code(), apart[:, :32], weight, added), expected)
    packed = panels_of(weight)
    product_code().product_added(
        added.data_ptr(), x.data_ptr(), packed.data_ptr(), added.data_ptr(), 7, 32, 2, 32, 32, 32
    )
    assert torch.equal(added, expected)
