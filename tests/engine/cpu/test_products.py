"""Our own products: exact to rounding, and the same bits whatever the rows, the strides or the vector width."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhfspec.engine.cpu import jit
from rlhfspec.engine.cpu.products import PANEL, TILINGS, product_name
from rlhfspec.engine.cpu.program import common_code


def panels_of(weight: Tensor) -> Tensor:
    return weight.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()


def run(
    x: Tensor,
    weight: Tensor,
    added: Tensor | None = None,
    width: int | None = None,
    ends: tuple[int, ...] = (),
) -> Tensor:
    held = np.array(ends or [x.shape[1]], dtype=np.int64)
    packed, out = panels_of(weight), torch.full((x.shape[0], weight.shape[0]), torch.nan)
    name = product_name(added=added is not None, bfloat16=weight.dtype == torch.bfloat16)
    common_code(width).operations[name](
        out=out.data_ptr(),
        x=x.data_ptr(),
        weights=packed.data_ptr(),
        added=0 if added is None else added.data_ptr(),
        ends=held.ctypes.data,
        parts=len(held),
        rows=x.shape[0],
        depth=x.shape[1],
        panels=len(packed),
        out_stride=out.stride(0),
        x_stride=x.stride(0),
        added_stride=0 if added is None else added.stride(0),
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
    torch.testing.assert_close(run(x, weight).double(), exact, rtol=1e-5, atol=1e-5)
    both = run(x, weight, added).double()
    torch.testing.assert_close(both, exact + added.double(), rtol=1e-5, atol=1e-5)


def test_a_result_is_one_chain_of_fused_multiply_adds() -> None:
    """In order of k and rounded once a term: what every processor computes alike."""
    x, weight, _ = case(2, 200, 16)
    expected = np.zeros((2, 16), dtype=np.float32)
    for k in range(200):
        # a product of two float32 is exact in float64; the sum is rounded there first, which shows once in 2^29
        term = np.outer(x[:, k].double().numpy(), weight[:, k].double().numpy())
        expected = (expected.astype(np.float64) + term).astype(np.float32)
    assert np.array_equal(run(x, weight).numpy(), expected)


@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("rows", [1, 7, 30])
def test_parts_are_added_as_a_tree_whoever_holds_them(rows: int, width: int) -> None:
    """(a + b) + (c + d), from chains of their own: what two or four ranks add up to, bit by bit."""
    x, weight, added = case(rows, 200, 48)
    ends = (50, 120, 130, 200)
    begins = (0, *ends)
    a, b, c, d = (
        run(x[:, begins[i] : end], weight[:, begins[i] : end].contiguous(), width=width)
        for i, end in enumerate(ends)
    )
    assert torch.equal(run(x, weight, width=width, ends=ends), (a + b) + (c + d))
    assert torch.equal(run(x, weight, added, width, ends), added + ((a + b) + (c + d)))
    left = run(x[:, :120], weight[:, :120].contiguous(), width=width, ends=(50, 120))
    assert torch.equal(left, a + b)
    three = run(x[:, :130], weight[:, :130].contiguous(), width=width, ends=(50, 120, 130))
    assert torch.equal(three, (a + b) + c)


def test_rows_do_not_see_each_other() -> None:
    x, weight, added = case(3 * max(tiling.rows for tiling in TILINGS.values()) + 1, 96, 80)
    alone = [run(x[i : i + 1], weight, added[i : i + 1]) for i in range(len(x))]
    for rows in range(1, len(x) + 1):
        assert torch.equal(run(x[:rows], weight, added[:rows]), torch.cat(alone[:rows]))


def test_the_vector_width_changes_no_bit() -> None:
    for rows, columns in ((8, 64), (17, 16), (6, 80)):
        x, weight, added = case(rows, 96, columns)
        assert torch.equal(run(x, weight, added, width=8), run(x, weight, added, width=16))


def test_bfloat16_weights_give_the_bits_of_the_same_weights_widened() -> None:
    for rows in (1, 6, 17):
        x, weight, added = case(rows, 96, 64)
        weight = weight.bfloat16()
        for width in (8, 16):
            assert torch.equal(run(x, weight, width=width), run(x, weight.float()))
            assert torch.equal(run(x, weight, added, width=width), run(x, weight.float(), added))


def test_rows_may_lie_apart_and_the_result_may_replace_what_is_added() -> None:
    x, weight, added = case(7, 32, 32)
    expected = run(x, weight, added)
    apart = torch.full((7, 40), torch.nan)
    apart[:, :32] = x
    assert torch.equal(run(apart[:, :32], weight, added), expected)
    packed = panels_of(weight)
    common_code().operations["product_added"](
        out=added.data_ptr(),
        x=x.data_ptr(),
        weights=packed.data_ptr(),
        added=added.data_ptr(),
        ends=np.array([32]).ctypes.data,
        parts=1,
        rows=7,
        depth=32,
        panels=2,
        out_stride=32,
        x_stride=32,
        added_stride=32,
    )
    assert torch.equal(added, expected)


def test_the_processor_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking takes a quarter of a millisecond, and every choice of tokens comes by here."""
    expected = common_code()

    def asked() -> None:
        raise AssertionError("the processor was asked again")

    monkeypatch.setattr("rlhfspec.engine.cpu.jit.llvm.get_host_cpu_features", asked)
    assert common_code() is expected


def test_code_keeps_to_what_torch_is_allowed_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """ATEN_CPU_CAPABILITY=avx2 makes of any processor one that has no more."""
    has = {"avx2": True, "avx512f": True, "avx512bf16": True, "amx-tile": True, "sse4a": False}
    monkeypatch.setattr("rlhfspec.engine.cpu.jit.llvm.get_host_cpu_features", lambda: has)
    for capability, width in (("AVX512", 16), ("AVX2", 8)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda said=capability: said)
        jit.features.cache_clear()
        used = {name for name, on in jit.features().items() if on}
        assert used == (set(has) - {"sse4a"} if width == 16 else {"avx2"}) and jit.widest_vector() == width
    jit.features.cache_clear()
