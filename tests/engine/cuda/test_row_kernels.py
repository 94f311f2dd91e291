"""The fused rows against their torch bodies in Triton's interpreter, and compiled for a GPU that is not there."""

import json
from pathlib import Path

import pytest
import torch

from rlhfspec.engine.cuda import row_operators
from rlhfspec.engine.model.compute_backend import RowOperators
from tests.helpers.forked_script import output_of
from tests.helpers.triton_scripts import COMPILE, MOST_REGISTERS, NEEDS_TRITON, interpreted

EQUAL = """
import torch
from rlhfspec.engine.cuda import row_kernels, row_operators

generator = torch.Generator().manual_seed(0)
def noise(*shape, dtype):
    return torch.randn(*shape, generator=generator).to(dtype)

def near(got, expected, what):
    # one rounding of the type; torch's library calls may round twice
    torch.testing.assert_close(got, expected, **({"rtol": 2e-6, "atol": 2e-6} if got.dtype == torch.float32 else {
        "rtol": 1e-2, "atol": 1e-5}), msg=lambda text: what + text)

for dtype in (torch.float32, torch.bfloat16):
    for rows, width in ((1, 64), (3, 576), (5, 4096)):
        wide = noise(rows, width + 8, dtype=dtype)
        x, gain = wide[:, :width], noise(width, dtype=dtype)
        for given in (gain, None):
            got = row_kernels.norm(x, given, 1e-5)
            near(got, row_operators.norm(x.contiguous(), given, 1e-5), "norm")
            alone = [row_kernels.norm(x[row : row + 1], given, 1e-5) for row in range(rows)]
            assert torch.equal(got, torch.cat(alone)), "a row depends on its company"
        inner = noise(rows, 2 * width, dtype=dtype) * 4
        got = row_kernels.gated(inner)
        near(got, row_operators.gated(inner), "gated")
        assert torch.equal(got, torch.cat([row_kernels.gated(row[None]) for row in inner]))
    for samples, n, heads, shared, size, gain in (
        (1, 1, 1, 1, 8, False), (3, 1, 2, 4, 64, True), (2, 5, 2, 2, 96, False), (2, 3, 1, 7, 128, True)
    ):
        tokens = samples * n
        qkv = noise(tokens + 2, heads * (shared + 2) * size, dtype=dtype)
        rope = torch.view_as_real(torch.polar(torch.ones(40, size // 2), noise(40, size // 2, dtype=torch.float32)))
        positions = torch.randint(0, 40, (tokens + 2,), generator=generator)
        head_gain = noise(shared + 1, size, dtype=torch.float32) if gain else None
        rows = torch.randperm(200, generator=generator)[: tokens * heads * 2]
        cells = noise(200, size, dtype=dtype)
        how = {"rope": rope, "head_gain": head_gain, "eps": 1e-6, "heads": heads}
        ours, theirs = cells.clone(), cells.clone()
        got = row_kernels.turn(qkv, positions, ours, rows, n, **how)
        near(got, row_operators.turn(qkv, positions, theirs, rows, n, **how), "queries")
        near(ours, theirs, "cells")
        untouched = torch.ones(200, dtype=torch.bool)
        untouched[rows] = False
        assert torch.equal(ours[untouched], cells[untouched]) and not torch.equal(ours[rows], cells[rows])
        # token by token, as a prefill asks, and one token alone
        single = row_kernels.turn(qkv, positions, cells.clone(), rows, 1, **how).unflatten(0, (samples, n, heads))
        assert torch.equal(single.transpose(1, 2).flatten(2, 3).flatten(0, 1), got)
        alone = row_kernels.turn(qkv[-3:-2], positions[-3:-2], cells.clone(), rows[-2 * heads :], 1, **how)
        assert torch.equal(alone, single[-1, -1])
print("equal")
"""
BUILD = """
from rlhfspec.engine.cuda import row_kernels

for dtype in ("fp32", "bf16"):
    x = "*" + dtype
    for block in (1024, 4096, 8192):
        built(f"norm {block} {dtype}", row_kernels._norm, [x, x, x, "i32", "i32", "fp32"],
              {"has_gain": dtype == "bf16", "block": block}, num_warps=min(max(block // 256, 1), 16))
    built("gated " + dtype, row_kernels._gated, [x, x, "i32", "i32"], {"block": row_kernels.GATED_BLOCK})
    types = [x, "*fp32", "*i64", "*fp32", x, "*i64", x, "i32", "i32", "fp32"]
    for lanes, size in ((6, 128), (4, 64), (9, 128), (3, 96)):
        constants = {"heads": 8, "lanes": lanes, "size": size, "has_gain": lanes == 4,
                     "block_lanes": triton.next_power_of_2(lanes), "block": triton.next_power_of_2(size)}
        built(f"turn {lanes} {size} {dtype}", row_kernels._turn, types, constants)
print(json.dumps(found))
"""


@NEEDS_TRITON
def test_kernels_equal_their_torch_bodies_and_rows_their_own_alone() -> None:
    assert interpreted(EQUAL) == "equal"


@NEEDS_TRITON
def test_kernels_compile_for_an_h100_without_one(tmp_path: Path) -> None:
    found = json.loads(output_of(COMPILE + BUILD, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0"))
    assert len(found) == 16
    for name, kernel in found.items():
        assert kernel["registers"] <= MOST_REGISTERS, (name, kernel)
        assert kernel["spilled"] == [0, 0], (name, kernel)


def test_operators_are_seen_as_one_call_on_every_device() -> None:
    """Shapes and types of the pretended results are the real ones."""
    rows = RowOperators()
    for device in ("cpu", "meta"):
        x = torch.randn(3, 64).to(device, torch.bfloat16)
        assert rows.norm(x, x[0], 1e-5).shape == (3, 64)
        assert rows.gated(x).shape == (3, 32)
        cells, positions = torch.zeros(40, 8).to(device), torch.tensor([3, 4, 5]).to(device)
        qkv, rope = torch.randn(3, 2 * 4 * 8).to(device), torch.ones(9, 4, 2).to(device)
        where = torch.arange(12).to(device)
        turned = rows.turn(qkv, positions, cells, where, 3, rope=rope, head_gain=None, eps=1e-5, heads=2)
        assert turned.shape == (2, 6, 8) and turned.device.type == device and turned.dtype == cells.dtype


@pytest.mark.parametrize("gain", [None, torch.rand(64)])
def test_the_norm_by_hand(gain: torch.Tensor | None) -> None:
    x = torch.randn(2, 64).double()
    mean = (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    expected = x / mean / 8.0 if gain is None else x / mean * gain
    torch.testing.assert_close(row_operators.norm(x.float(), gain, 1e-3), expected.float())
