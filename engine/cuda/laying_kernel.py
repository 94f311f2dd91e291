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
MOST_PARTS = 4
"Queries, keys, values, and a row that fills up."


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
    # a part that is not there has no rows
    given = [*(part.view(words) for part in parts), *[parts[0].view(words)] * (MOST_PARTS - len(parts))]
    ends = [*accumulate(map(len, parts)), *[sum(map(len, parts))] * (MOST_PARTS - len(parts))]
    _lay[(triton.cdiv(rows, BLOCK), triton.cdiv(width, BLOCK))](
        *given,
        *(part.stride(0) for part in given),
        *ends,
        matrix if order is None else order,
        matrix.view(words),
        differ,
        rows,
        width,
        has_order=order is not None,
        compares=compares,
        block=BLOCK,
        num_warps=8,
    )


@triton.jit
@no_type_check
def _rows_of(part, stride, row, begin, end, column, inside):
    """What lies in one part of some rows, 0 for the others'."""
    place = (row - begin)[:, None] * stride + column[None, :]
    return tl.load(part + place, mask=inside & ((row >= begin) & (row < end))[:, None], other=0)


@triton.jit
@no_type_check
def _lay(
    first,
    second,
    third,
    fourth,
    first_stride,
    second_stride,
    third_stride,
    fourth_stride,
    first_end,
    second_end,
    third_end,
    fourth_end,
    order,
    matrix,
    differ,
    rows,
    width,
    has_order: tl.constexpr,
    compares: tl.constexpr,
    block: tl.constexpr,
):
    """A square of the matrix, written, or compared with what it would be."""
    number = tl.program_id(0) * block + tl.arange(0, block)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = (number < rows)[:, None] & (column < width)[None, :]
    row = number.to(tl.int64)
    if has_order:
        row = tl.load(order + number, mask=number < rows, other=0)
    words = _rows_of(first, first_stride, row, 0, first_end, column, inside)
    words |= _rows_of(second, second_stride, row, first_end, second_end, column, inside)
    words |= _rows_of(third, third_stride, row, second_end, third_end, column, inside)
    words |= _rows_of(fourth, fourth_stride, row, third_end, fourth_end, column, inside)
    place = matrix + column[None, :].to(tl.int64) * rows + number[:, None]
    if compares:
        held = tl.load(place, mask=inside, other=0)
        if tl.max(tl.max((held != words).to(tl.int32), 1), 0) > 0:
            tl.store(differ, 1)
    else:
        tl.store(place, words, mask=inside)
