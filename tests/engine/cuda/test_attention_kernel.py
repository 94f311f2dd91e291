"""Split attention against the formula in Triton's interpreter, and compiled for a GPU that is not there."""

import json
from pathlib import Path

from tests.helpers.forked_script import output_of
from tests.helpers.triton_scripts import COMPILE, NEEDS_TRITON, interpreted

EQUAL = """
import torch
from rlhfspec.engine.cuda import attention_kernel, row_operators

generator = torch.Generator().manual_seed(0)

def tree(samples, earlier, tokens, spare):
    columns = earlier + tokens
    seen = torch.zeros(samples, columns, columns + spare, dtype=torch.bool)
    depth = torch.zeros(samples, columns + spare, dtype=torch.int64)
    for sample in range(samples):
        seen[sample, 0, 0] = True
        for node in range(1, columns):
            parent = int(torch.randint(0, node, (), generator=generator))
            seen[sample, node] = seen[sample, parent]
            seen[sample, node, node] = True
            depth[sample, node] = depth[sample, parent] + 1
    if earlier:
        # a level's tokens stand at one depth
        depth[:, earlier:columns] = depth[:, :columns].amax(1, keepdim=True)
    return seen[:, earlier:].contiguous(), depth, depth[:, earlier:columns].contiguous()

# the interpreter has no products of bfloat16
for dtype, near in ((torch.float32, 3e-6), (torch.float16, 4e-3)):
    for bases, heads, queries, earlier, tokens, is_tree, window, softcap, size, programs in (
        ((3,), 2, 4, 0, 1, False, None, None, 64, 512),
        ((700, 0, 130), 1, 4, 0, 1, False, 100, None, 96, 512),
        ((5, 260), 1, 2, 0, 35, False, 7, 30.0, 16, 1),
        ((200, 1, 64), 1, 4, 0, 17, True, None, None, 32, 12),
        ((0, 190), 2, 3, 4, 2, True, None, 20.0, 8, 512),
        ((150, 30, 128), 2, 1, 3, 4, True, 5, None, 16, 12),
        # parts of more blocks than the least
        ((1, 900), 1, 1, 0, 2, True, None, None, 16, 4),
    ):
        if dtype == torch.float16 and size > 32:
            continue
        attention_kernel.PROGRAMS = programs
        capacity, samples = max(bases) + earlier + tokens + 32, len(bases)
        base = torch.tensor(bases)
        q = torch.randn(samples * heads, tokens * queries, size, generator=generator).to(dtype)
        stored = torch.randn(2, samples * heads, capacity + 8, size, generator=generator)
        keys, values = stored.to(dtype)[:, :, :capacity]
        marks = tree(samples, earlier, tokens, 6) if is_tree else (None, None, None)
        marks = marks if window is not None else (marks[0], None, None)
        rest = (*marks, tokens, window, size ** -0.5, softcap)
        got = attention_kernel.attend(q, keys, values, base, *rest)
        torch.testing.assert_close(got, row_operators.attend(q, keys, values, base, *rest), rtol=near, atol=near)
        # what lies behind a sample's end, and how long the others are, is of no matter
        longer = torch.full_like(base, capacity - earlier - tokens - 6)
        longer[-1] = base[-1]
        held = int(base[-1]) + earlier + tokens
        keys[-heads:, held:] = values[-heads:, held:] = 1e4
        again = attention_kernel.attend(q, keys, values, longer, *rest)
        assert torch.equal(again[-tokens:], got[-tokens:]), "a sample depends on its company"
print("equal")
"""
BUILD = """
from rlhfspec.engine.cuda import attention_kernel

of_samples, lengths = ["*i64", "*i64", "i32"], ["i32"] * 4
model = {"heads": 8, "queries": 4}
# heads of 128 are whole vectors
aligned = ("q", "keys", "values", "seen", "column_depth", "base", "token_depth", "out", "sums",
           "q_head", "q_row", "key_head", "key_row")
for dtype in ("fp16", "bf16"):
    x = "*" + dtype
    for block_rows, is_tree, window, is_split in (
        (16, False, 0, True), (16, True, 9, False), (32, True, 9, True), (64, True, 9, True)
    ):
        partial = ["*fp32" if is_split else x] * 2
        types = [x, x, x, "*u8", "*i64", *of_samples, *partial, *["i32"] * 4, *lengths, "fp32"]
        constants = {**model, "window": window, "size": 128, "softcap": 1.0 * window, "is_tree": is_tree,
                     "block_size": 128, "block_rows": block_rows, "is_split": is_split}
        built(f"attend {dtype} {block_rows} {is_tree} {is_split}", attention_kernel._attend, types, constants,
              num_warps=4 if block_rows == 16 else 8, aligned=aligned)
    constants = {**model, "window": 9, "size": 128, "is_tree": True, "block_size": 128, "block_parts": 8}
    built(f"join {dtype}", attention_kernel._join, ["*fp32", "*fp32", x, *of_samples, *lengths], constants)
print(json.dumps(found))
"""


@NEEDS_TRITON
def test_it_equals_torchs_over_ragged_lengths_trees_and_windows() -> None:
    assert interpreted(EQUAL) == "equal"


@NEEDS_TRITON
def test_it_compiles_for_an_h100_without_one(tmp_path: Path) -> None:
    found = json.loads(output_of(COMPILE + BUILD, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0"))
    assert len(found) == 10
    for name, kernel in found.items():
        assert kernel["spilled"] == [0, 0], (name, kernel)
