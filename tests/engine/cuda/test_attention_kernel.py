"""Split attention against the formula in Triton's interpreter, and compiled for a GPU that is not there."""

import json
from pathlib import Path

from tests.helpers.triton_scripts import COMPILE, NEEDS_TRITON, output_of

EQUAL = """
import torch
from rlhfspec.engine.attention.backends import reference_attention, sdpa_attention
from rlhfspec.engine.cuda.attention_kernel import SPLIT, split_attention

generator = torch.Generator().manual_seed(0)
# the interpreter has no products of bfloat16
for dtype, near in ((torch.float32, 2e-6), (torch.float16, 3e-3)):
    for samples, heads, rows, view, size in ((1, 2, 4, 32, 64), (3, 2, 20, 96, 96), (2, 1, 70, SPLIT + 64, 16),
                                             (1, 1, 4, 2 * SPLIT + 32, 32), (1, 2, 4, 64, 8), (1, 1, 4, 64, 136)):
        merged = samples * heads
        q = torch.randn(merged, rows + 2, size, generator=generator).to(dtype)
        stored = torch.randn(2, merged, view + 32, size, generator=generator).to(dtype)
        keys, values = stored[0][:, :view], stored[1][:, :view]
        seen = torch.rand(samples, rows, view, generator=generator) < 0.4
        # one whole stretch that nobody sees
        seen[..., : view - 20] &= view <= SPLIT
        seen[..., -1] = True
        bias = torch.zeros(seen.shape).masked_fill(~seen, float("-inf")).to(dtype)
        if rows == 4:
            bias = bias[:, :1]
        how = {"rows": rows, "scaling": size ** -0.5, "softcap": None}
        got = split_attention(q, keys, values, bias, **how)
        torch.testing.assert_close(got, reference_attention(q[:, :rows], keys, values, bias, **how),
                                   rtol=near, atol=near)
        if dtype == torch.float32 or size > 128:
            assert torch.equal(got, sdpa_attention(q, keys, values, bias, **how)), "torch's"
            continue
        alone = split_attention(q[-heads:], keys[-heads:], values[-heads:], bias[-1:], **how)
        assert torch.equal(alone, got[-heads:]), "a sample depends on its company"
        if rows != 4:
            # further positions in view that nobody sees
            wider = torch.cat([bias, torch.full((*bias.shape[:2], 32), float("-inf"), dtype=dtype)], 2)
            assert torch.equal(split_attention(q, stored[0], stored[1], wider, **how), got), "the view counts"
print("equal")
"""
BUILD = """
from rlhfspec.engine.cuda import attention_kernel

for dtype in ("fp16", "bf16"):
    x = "*" + dtype
    for block_rows, is_split in ((16, False), (16, True), (32, True)):
        types = [x, x, x, x, "*fp32" if is_split else x, "*fp32" if is_split else x, *["i64"] * 8, *["i32"] * 5, "fp32"]
        constants = {"size": 128, "block_size": 128, "block_rows": block_rows, "block": attention_kernel.BLOCK,
                     "split": attention_kernel.SPLIT, "is_split": is_split}
        built(f"attend {dtype} {block_rows} {is_split}", attention_kernel._attend, types, constants)
    built(f"join {dtype}", attention_kernel._join, ["*fp32", "*fp32", x, "i32", "i32"],
          {"size": 128, "block_size": 128, "block": 8})
print(json.dumps(found))
"""


@NEEDS_TRITON
def test_it_equals_the_formula_whatever_the_batch_and_view() -> None:
    assert output_of(EQUAL, TRITON_INTERPRET="1") == "equal"


@NEEDS_TRITON
def test_it_compiles_for_an_h100_without_one(tmp_path: Path) -> None:
    found = json.loads(output_of(COMPILE + BUILD, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0"))
    assert len(found) == 8
    for name, kernel in found.items():
        assert kernel["spilled"] == [0, 0], (name, kernel)
