"""Attention of a tree's tokens over long caches, by lengths: one kernel, or two where caches are split (Triton, CUDA).

A program takes some rows of one (sample, KV head) over a part of what that sample has cached: parts are alike whatever
the others' lengths, a program behind a sample's end returns at once, and nothing depends on the cache's capacity. How
many parts there are follows from the number of samples, so that few of them fill a GPU too: as with the library's
products, a row's bits depend on how many run, not on which. Imported only where Triton is.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
PROGRAMS = 512
"That a split is to give, about: four for each multiprocessor of an H100."
BLOCK = tl.constexpr(64)
"Cached positions at once."
LEAST = tl.constexpr(128)
"Of a part, whole blocks: less is not worth a program."
MOST_ROWS = 64
"Of one program: a tree of 16 reads keys and values twice where four queries share a head."
LENGTHS = ("own_stride", "tokens", "columns", "view", "parts")
"Integers that no kernel is made anew for."


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    base: Tensor,
    seen: Tensor | None,
    column_depth: Tensor | None,
    token_depth: Tensor | None,
    tokens: int,
    window: int | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """See `engine.cuda.row_operators.attend`; keys and values lie alike."""
    merged, rows, size = q.shape
    block_rows = min(max(triton.next_power_of_2(rows), 16), MOST_ROWS)
    row_blocks = triton.cdiv(rows, block_rows)
    parts = min(max(PROGRAMS // (merged * row_blocks), 1), triton.cdiv(keys.shape[1], LEAST.value))
    packed = len(base) * tokens
    out = torch.empty(packed, q.numel() // packed, dtype=q.dtype, device=q.device)
    partial = sums = out
    if parts > 1:
        partial = torch.empty(merged, rows, parts, size, dtype=torch.float32, device=q.device)
        sums = torch.empty(2, merged, rows, parts, dtype=torch.float32, device=q.device)
    own = base if token_depth is None else token_depth
    of_samples = (base, own, own.stride(0))
    lengths = (tokens, tokens if seen is None else seen.shape[2], keys.shape[1], parts)
    model = {"heads": merged // len(base), "queries": rows // tokens, "window": window or 0, "size": size}
    _attend[(merged, row_blocks, parts)](
        q,
        keys,
        values,
        base if seen is None else seen.view(torch.uint8),
        base if column_depth is None else column_depth,
        *of_samples,
        partial,
        sums,
        *q.stride()[:2],
        *keys.stride()[:2],
        *lengths,
        # of what exponents of 2 are taken: scores, or twice what is bounded
        scaling * LOG2_E if softcap is None else scaling * 2 * LOG2_E / softcap,
        **model,
        softcap=0.0 if softcap is None else softcap * LOG2_E,
        is_tree=seen is not None,
        # what tensor cores take at least
        block_size=max(triton.next_power_of_2(size), 16),
        block_rows=block_rows,
        is_split=parts > 1,
        # four would spill
        num_warps=4 if block_rows == 16 else 8,
        num_stages=2,
    )
    if parts > 1:
        _join[(merged * rows,)](
            partial,
            sums,
            out,
            *of_samples,
            *lengths,
            **model,
            is_tree=seen is not None,
            block_size=triton.next_power_of_2(size),
            block_parts=triton.next_power_of_2(parts),
            num_warps=4,
        )
    return out


@triton.jit
@no_type_check
def _extent(base, token_depth, own_stride, sample, columns, view, parts, window, is_tree):
    """Where a sample's columns start, what its first token may see: from, to, and how much of it a part takes."""
    start = tl.load(base + sample).to(tl.int32)
    end = tl.minimum(start + columns, view)
    begin = start * 0
    if window:
        begin = start - window + 1
        if is_tree:
            begin += tl.load(token_depth + sample * own_stride).to(tl.int32)
        begin = tl.maximum(begin, 0)
    return start, begin, end, tl.maximum(tl.cdiv(tl.cdiv(end - begin, parts), BLOCK) * BLOCK, LEAST)


@triton.jit
@no_type_check
def _place(head, row, tokens, heads, queries):
    """Where a row goes: token by token, heads behind one another, of each its queries."""
    token = head // heads * tokens + row // queries
    return (token * heads + head % heads) * queries + row % queries


@triton.jit
@no_type_check
def _visible(seen, column_depth, own, token, has_row, behind, inside, columns, window, is_tree):
    """Which positions each row sees; `behind` the first column they are columns, before it they count back."""
    if is_tree:
        is_column = (behind >= 0) & inside
        marks = seen + (token[:, None] * columns + behind[None, :])
        marked = tl.load(marks, mask=has_row[:, None] & is_column[None, :], other=0) != 0
        visible = marked | (behind < 0)[None, :]
        if window:
            of_column = tl.load(column_depth + behind, mask=is_column, other=0).to(tl.int32)
            behind = tl.where(is_column, of_column, behind)
    else:
        visible = behind[None, :] <= token[:, None]
    if window:
        visible = visible & (own[:, None] - behind[None, :] < window)
    return visible & inside[None, :]


@triton.jit
@no_type_check
def _scores(query, key, scaling, softcap):
    """To the base of 2."""
    scores = tl.dot(query, tl.trans(key)) * scaling
    if softcap != 0.0:
        # the hyperbolic tangent
        scores = softcap - 2.0 * softcap / (tl.exp2(scores) + 1.0)
    return scores


@triton.jit(do_not_specialize=LENGTHS)
@no_type_check
def _attend(
    q,
    keys,
    values,
    seen,
    column_depth,
    base,
    token_depth,
    own_stride,
    out,
    sums,
    q_head,
    q_row,
    key_head,
    key_row,
    tokens,
    columns,
    view,
    parts,
    scaling,
    heads: tl.constexpr,
    queries: tl.constexpr,
    window: tl.constexpr,
    size: tl.constexpr,
    softcap: tl.constexpr,
    is_tree: tl.constexpr,
    block_size: tl.constexpr,
    block_rows: tl.constexpr,
    is_split: tl.constexpr,
):
    """Some rows of one (sample, KV head) over one part of what its sample has cached."""
    head = tl.program_id(0).to(tl.int64)
    sample, part = head // heads, tl.program_id(2)
    start, begin, end, stretch = _extent(
        base, token_depth, own_stride, sample, columns, view, parts, window, is_tree
    )
    begin += part * stretch
    if begin >= end:
        return
    end = tl.minimum(begin + stretch, end)
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    column, each = tl.arange(0, block_size), tl.arange(0, BLOCK)
    has_row, has_column = row < tokens * queries, column < size
    token, is_held = row // queries, has_row[:, None] & has_column[None, :]
    query = tl.load(q + head * q_head + row[:, None] * q_row + column[None, :], mask=is_held, other=0.0)
    own = token
    if is_tree and window:
        own = tl.load(token_depth + sample * own_stride + token, mask=has_row, other=0).to(tl.int32)
    seen += sample * tokens * columns
    column_depth += sample * columns
    cell = head * key_head + begin.to(tl.int64) * key_row
    cells = each[:, None] * key_row + column[None, :]
    largest, total = tl.full((block_rows,), float("-inf"), tl.float32), tl.zeros((block_rows,), tl.float32)
    attended = tl.zeros((block_rows, block_size), tl.float32)
    for first in range(begin, end, BLOCK):
        inside, behind = first + each < end, first + each - start
        is_cell = inside[:, None] & has_column[None, :]
        key = tl.load(keys + cell + cells, mask=is_cell, other=0.0)
        visible = _visible(seen, column_depth, own, token, has_row, behind, inside, columns, window, is_tree)
        scores = tl.where(visible, _scores(query, key, scaling, softcap), float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # rows that have seen nothing so far
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights, kept = tl.exp2(scores - shift[:, None]), tl.exp2(largest - shift)
        total = total * kept + tl.sum(weights, 1)
        value = tl.load(values + cell + cells, mask=is_cell, other=0.0)
        attended = attended * kept[:, None] + tl.dot(weights.to(value.dtype), value)
        largest = new_largest
        cell += BLOCK * key_row
    if is_split:
        at = (head * tokens * queries + row) * parts + part
        tl.store(sums + at, largest, mask=has_row)
        tl.store(sums + tl.num_programs(0) * tokens * queries * parts + at, total, mask=has_row)
        tl.store(out + at[:, None] * size + column[None, :], attended, mask=is_held)
    else:
        attended = (attended / tl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty)
        place = _place(head, row, tokens, heads, queries)
        tl.store(out + place[:, None] * size + column[None, :], attended, mask=is_held)


@triton.jit(do_not_specialize=LENGTHS)
@no_type_check
def _join(
    partial,
    sums,
    out,
    base,
    token_depth,
    own_stride,
    tokens,
    columns,
    view,
    parts,
    heads: tl.constexpr,
    queries: tl.constexpr,
    window: tl.constexpr,
    size: tl.constexpr,
    is_tree: tl.constexpr,
    block_size: tl.constexpr,
    block_parts: tl.constexpr,
):
    """One row from its parts, as many as its sample has."""
    row = tl.program_id(0).to(tl.int64)
    head = row // (tokens * queries)
    _, begin, end, stretch = _extent(
        base, token_depth, own_stride, head // heads, columns, view, parts, window, is_tree
    )
    part, column = tl.arange(0, block_parts), tl.arange(0, block_size)
    inside = begin + part * stretch < end
    largest = tl.load(sums + row * parts + part, mask=inside, other=float("-inf"))
    total = tl.load(sums + (tl.num_programs(0) + row) * parts + part, mask=inside, other=0.0)
    top = tl.max(largest, 0)
    share = tl.exp2(largest - tl.where(top == float("-inf"), 0.0, top))
    attended = tl.load(
        partial + (row * parts + part[:, None]) * size + column[None, :],
        mask=inside[:, None] & (column < size)[None, :],
        other=0.0,
    )
    whole = tl.sum(total * share, 0)
    joined = tl.sum(attended * share[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    place = _place(head, row % (tokens * queries), tokens, heads, queries)
    tl.store(out + place * size + column, joined.to(out.dtype.element_ty), mask=column < size)
