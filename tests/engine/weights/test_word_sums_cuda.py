"""The kernel's sums are torch's, in Triton's interpreter, and it compiles for a GPU that is not there."""

import json
from pathlib import Path

from tests.helpers.forked_script import output_of
from tests.helpers.triton_scripts import COMPILE, MOST_REGISTERS, NEEDS_TRITON, interpreted

EQUAL = """
import torch
from rlhfspec.engine.weights.word_sums_cuda import BLOCK, add_word_sums
from rlhfspec.engine.weights.digests import word_sums

for count in (0, 1, 7, BLOCK, BLOCK + 1, 3 * BLOCK - 5):
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), dtype=torch.int64)
    sums = torch.zeros(2, dtype=torch.int64)
    add_word_sums(words, sums)
    assert torch.equal(sums, word_sums(words)), (count, sums)
print("equal")
"""
BUILD = """
from rlhfspec.engine.weights import word_sums_cuda as word_kernel

built("words", word_kernel._word_sums, ["*i64", "*i64", "i32", "i32"], {"block": word_kernel.BLOCK}, num_warps=8)
built("many words", word_kernel._word_sums, ["*i64", "*i64", "i64", "i64"], {"block": word_kernel.BLOCK}, num_warps=8)
print(json.dumps(found))
"""


@NEEDS_TRITON
def test_the_kernels_sums_are_torchs() -> None:
    assert interpreted(EQUAL) == "equal"


@NEEDS_TRITON
def test_the_kernel_compiles_with_unsigned_shifts(tmp_path: Path) -> None:
    found = json.loads(output_of(COMPILE + BUILD, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0"))
    for kernel in found.values():
        assert kernel["registers"] <= MOST_REGISTERS and kernel["spilled"] == [0, 0], kernel
        assert "shr.u64" in kernel["shifts"] and "shr.s64" not in kernel["shifts"], kernel
