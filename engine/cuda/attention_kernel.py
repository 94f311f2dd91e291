"""Attention of few rows over a long cache, in one kernel, or in two where the cache is split (Triton, CUDA).

Programs share the cache: each takes a stretch of SPLIT positions of one (sample, KV head), whatever the view's length,
and the stretches are joined in order. So a row's bits depend on neither the view nor the batch; masked positions add
exact zeros. Imported only where Triton is.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.backends import SHARE_BIAS, sdpa_attention

SPLIT = 512
"Cached positions of one program."
BLOCK = 64
"Of them at once."
MOST_ROWS = 32
"Of one program."
FEW_ROWS, MAX_HEAD_SIZE = 256, 128
"""Beyond, torch's kernel serves: it has larger blocks for a prompt's rows. It serves float32 too, whose exact products
run on no tensor core and spill 1,120 bytes a thread here (compiled for sm_90)."""


def split_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    *,
    rows: int,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """See `engine.attention.Attention`; one bias may serve all heads of a sample."""
    if softcap is not None or rows > FEW_ROWS or q.shape[2] > MAX_HEAD_SIZE or q.dtype == torch.float32:
        return sdpa_attention(q, keys, values, bias, rows=rows, scaling=scaling, softcap=softcap)
    merged, view, size = keys.shape
    block_rows = min(max(triton.next_power_of_2(rows), 16), MOST_ROWS)
    row_blocks, splits = triton.cdiv(rows, block_rows), triton.cdiv(view, SPLIT)
    out = torch.empty(merged, rows, size, dtype=q.dtype, device=q.device)
    partial = sums = out
    if splits > 1:
        partial = torch.empty(merged, rows, splits, size, dtype=torch.float32, device=q.device)
        sums = torch.empty(2, merged, rows, splits, dtype=torch.float32, device=q.device)
    _attend[(merged, row_blocks, splits)](
        q,
        keys,
        values,
        bias,
        partial,
        sums,
        q.stride(0),
        q.stride(1),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        bias.stride(0),
        0 if bias.shape[1] == 1 else bias.stride(1),
        merged // bias.shape[0],
        rows,
        view,
        splits,
        merged * rows * splits,
        scaling * 1.4426950408889634,
        size=size,
        # what tensor cores take at least
        block_size=max(triton.next_power_of_2(size), 16),
        block_rows=block_rows,
        block=BLOCK,
        split=SPLIT,
        is_split=splits > 1,
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        _join[(merged * rows,)](
            partial,
            sums,
            out,
            splits,
            merged * rows * splits,
            size=size,
            block_size=triton.next_power_of_2(size),
            block=triton.next_power_of_2(splits),
            num_warps=4,
        )
    return out


SHARE_BIAS.add(split_attention)


@triton.jit
@no_type_check
def _attend(
    q,
    keys,
    values,
    bias,
    out,
    sums,
    q_head,
    q_row,
    key_head,
    key_row,
    value_head,
    value_row,
    bias_sample,
    bias_row,
    heads_of_bias,
    rows,
    view,
    splits,
    sums_stride,
    scaling,
    size: tl.constexpr,
    block_size: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
    split: tl.constexpr,
    is_split: tl.constexpr,
):
    """Some rows of one (sample, KV head) over one stretch of its cache."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    part = tl.program_id(2)
    column = tl.arange(0, block_size)
    has_row, has_column = row < rows, column < size
    is_held = has_row[:, None] & has_column[None, :]
    query = tl.load(q + head * q_head + row[:, None] * q_row + column[None, :], mask=is_held, other=0.0)
    largest = tl.full((block_rows,), float("-inf"), tl.float32)
    total = tl.zeros((block_rows,), tl.float32)
    attended = tl.zeros((block_rows, block_size), tl.float32)
    for begin in range(part * split, min(part * split + split, view), block):
        position = begin + tl.arange(0, block)
        inside = position < view
        key = tl.load(
            keys + head * key_head + position[None, :].to(tl.int64) * key_row + column[:, None],
            mask=inside[None, :] & has_column[:, None],
            other=0.0,
        )
        seen = tl.load(
            bias + (head // heads_of_bias) * bias_sample + row[:, None] * bias_row + position[None, :],
            mask=has_row[:, None] & inside[None, :],
            other=float("-inf"),
        ).to(tl.float32)
        scores = tl.dot(query, key) * scaling + seen
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # rows that have seen nothing so far
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - shift[:, None])
        kept = tl.exp2(largest - shift)
        total = total * kept + tl.sum(weights, 1)
        value = tl.load(
            values + head * value_head + position[:, None].to(tl.int64) * value_row + column[None, :],
            mask=inside[:, None] & has_column[None, :],
            other=0.0,
        )
        attended = attended * kept[:, None] + tl.dot(weights.to(value.dtype), value)
        largest = new_largest
    place = head * rows + row
    if is_split:
        at = place * splits + part
        tl.store(sums + at, largest, mask=has_row)
        tl.store(sums + sums_stride + at, total, mask=has_row)
        tl.store(out + at[:, None] * size + column[None, :], attended, mask=is_held)
    else:
        attended = (attended / tl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty)
        tl.store(out + place[:, None] * size + column[None, :], attended, mask=is_held)


@triton.jit
@no_type_check
def _join(
    partial,
    sums,
    out,
    splits,
    sums_stride,
    size: tl.constexpr,
    block_size: tl.constexpr,
    block: tl.constexpr,
):
    """One row from its stretches."""
    row = tl.program_id(0).to(tl.int64)
    part, column = tl.arange(0, block), tl.arange(0, block_size)
    inside = part < splits
    largest = tl.load(sums + row * splits + part, mask=inside, other=float("-inf"))
    total = tl.load(sums + sums_stride + row * splits + part, mask=inside, other=0.0)
    top = tl.max(largest, 0)
    share = tl.exp2(largest - tl.where(top == float("-inf"), 0.0, top))
    attended = tl.load(
        partial + (row * splits + part[:, None]) * size + column[None, :],
        mask=inside[:, None] & (column < size)[None, :],
        other=0.0,
    )
    whole = tl.sum(total * share, 0)
    joined = tl.sum(attended * share[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + row * size + column, joined.to(out.dtype.element_ty), mask=column < size)
