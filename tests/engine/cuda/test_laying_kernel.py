"""Weights laid out by one kernel against torch's calls in Triton's interpreter, and compiled without a GPU."""

import json
from pathlib import Path

import pytest
import torch

from rlhfspec.engine.cuda.cuda_backend import CudaBackend
from rlhfspec.engine.model.linears import MatrixLinear, Rows
from tests.helpers.forked_script import output_of
from tests.helpers.triton_scripts import COMPILE, NEEDS_TRITON, interpreted

EQUAL = """
import torch
from rlhfspec.engine.cuda import laying_kernel, row_operators

generator = torch.Generator().manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    for sizes, width, ordered in (((70,), 33, False), ((8, 4, 4, 1), 100, True), ((5, 130, 1), 64, True)):
        # parts of wider tensors, as a rank's columns are
        parts = [torch.randn(rows, width + 3, generator=generator).to(dtype)[:, 2:-1] for rows in sizes]
        order = torch.randint(0, sum(sizes), (sum(sizes) + 9,), generator=generator) if ordered else None
        rows = sum(sizes) if order is None else len(order)
        expected, got = torch.zeros(2, width, rows, dtype=dtype)
        row_operators.lay_rows(parts, order, expected)
        laying_kernel.lay_rows(parts, order, got)
        assert torch.equal(got, expected) and laying_kernel.hold_rows(parts, order, got)
        for place in ((0, 0), (width - 1, rows - 1)):
            changed = got.clone()
            changed[place] = -changed[place] if changed[place] else -0.0
            assert not laying_kernel.hold_rows(parts, order, changed)
print("equal")
"""
BUILD = """
from rlhfspec.engine.cuda import laying_kernel

for compares in (False, True):
    x = "*i16"
    # queries, keys, values, and a row that fills up
    types = [(x,) * 4, ("i32",) * 4, ("i32",) * 4, "*i64", x, "*i32" if compares else x, "i32", "i32"]
    built(f"lay {compares}", laying_kernel._lay, types, {"num_parts": 4, "compares": compares, "block": 64},
          num_warps=8)
print(json.dumps(found))
"""


@NEEDS_TRITON
def test_it_moves_the_bits_that_torch_moves_and_finds_one_that_changed() -> None:
    assert interpreted(EQUAL) == "equal"


@NEEDS_TRITON
def test_it_compiles_for_an_h100_without_one(tmp_path: Path) -> None:
    found = json.loads(output_of(COMPILE + BUILD, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0"))
    assert len(found) == 2
    for name, kernel in found.items():
        assert kernel["spilled"] == [0, 0], (name, kernel)


@pytest.mark.parametrize("gain", [None, torch.rand(16)])
def test_a_linear_holds_what_it_took(gain: torch.Tensor | None) -> None:
    parts = (torch.randn(6, 16), torch.randn(3, 16))
    rows = Rows(parts, torch.tensor([7, 0, 8, 3, 2, 1, 6, 5, 4]), gain)
    linear = CudaBackend(torch.device("cpu")).linear(torch.zeros(9, 16), torch.zeros(9), torch.float32)
    assert isinstance(linear, MatrixLinear)
    linear.take(rows, torch.ones(9))
    assert torch.equal(linear.unpacked()[0], rows.dense()) and linear.holds(rows, torch.ones(9))
    assert not linear.holds(rows, torch.zeros(9))
    linear.unpacked()[0][8, 3] += 1.0
    assert not linear.holds(rows, torch.ones(9))
