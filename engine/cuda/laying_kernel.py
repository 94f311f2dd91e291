"""Lays published weights out as products read them, and reads them back, in one pass each (Triton, CUDA).

torch gathers the parts, puts their rows in order, and transposes them, each a pass over memory and back, and does it
again to compare. Bits are moved as integers. Imported only where Triton is.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
from itertools import accumulate
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
"Rows and columns of one program."


def lay_rows(parts: list[Tensor], order: Tensor | None, matrix: Tensor) -> None:
    """See `engine.cuda.row_operators.lay_rows`."""
    _pass(parts, order, matrix, matrix, compares=False)


def hold_rows(parts: list[Tensor], order: Tensor | None, matrix: Tensor) -> Tensor:
    """See `engine.cuda.row_operators.hold_rows`."""
    differ = torch.zeros((), dtype=torch.int32, device=matrix.device)
    _pass(parts, order, matrix, differ, compares=True)
    return differ == 0


def _pass(
    parts: list[Tensor], order: Tensor | None, matrix: Tensor, differ: Tensor, *, compares: bool
) -> None:
    words = {2: torch.int16, 4: torch.int32}[matrix.element_size()]
    width, rows = matrix.shape
    _lay[(triton.cdiv(rows, BLOCK), triton.cdiv(width, BLOCK))](
        tuple(part.view(words) for part in parts),
        tuple(part.stride(0) for part in parts),
        tuple(accumulate(map(len, parts))),
        order,
        matrix.view(words),
        differ,
        rows,
        width,
        num_parts=len(parts),
        compares=compares,
        block=BLOCK,
        num_warps=8,
    )


@triton.jit
@no_type_check
def _lay(
    parts,
    strides,
    ends,
    order,
    matrix,
    differ,
    rows,
    width,
    num_parts: tl.constexpr,
    compares: tl.constexpr,
    block: tl.constexpr,
):
    """A square of the matrix, written, or compared with what it would be."""
    number = tl.program_id(0) * block + tl.arange(0, block)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = (number < rows)[:, None] & (column < width)[None, :]
    row = number.to(tl.int64)
    if order is not None:
        row = tl.load(order + number, mask=number < rows, other=0)
    words = tl.zeros((block, block), matrix.dtype.element_ty)
    begin = 0
    for index in tl.static_range(num_parts):
        is_of_part = inside & ((row >= begin) & (row < ends[index]))[:, None]
        place = (row - begin)[:, None] * strides[index] + column[None, :]
        words |= tl.load(parts[index] + place, mask=is_of_part, other=0)
        begin = ends[index]
    place = matrix + column[None, :].to(tl.int64) * rows + number[:, None]
    if compares:
        held = tl.load(place, mask=inside, other=0)
        if tl.max(tl.max((held != words).to(tl.int32), 1), 0) > 0:
            tl.store(differ, 1)
    else:
        tl.store(place, words, mask=inside)
