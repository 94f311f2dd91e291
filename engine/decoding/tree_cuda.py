"""What grows and cuts a draft's tree between two forwards, one program a sample (Triton, CUDA).

Nodes are put in order by counting those that stand before each, so that nothing is sorted. What is computed is said in
torch by `engine.drafters.level_drafter` and `engine.decoding.draft_tree.select_best`. Imported only where Triton is.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from .noise_cuda import fused_leaders as leaders  # noqa: F401 (an operator's kernel)

CHUNK = 16
"Nodes that all others are compared with at once."


def grow(
    best: Tensor,
    best_ids: Tensor,
    sums: Tensor,
    frontier: Tensor | None,
    frontier_score: Tensor | None,
    frontier_seen: Tensor | None,
    candidates: Tensor,
    scores: Tensor,
    offset: int,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `engine.decoding.tree_operators`."""
    batch, rows, num_blocks, count = best.shape
    columns = 0 if frontier_seen is None else frontier_seen.shape[2]
    following = candidates.new_empty(3, batch, width)
    score = scores.new_empty(batch, width)
    seen = torch.empty(batch, width, columns + width, dtype=torch.bool, device=scores.device)
    block_rows, block_count = triton.next_power_of_2(rows), triton.next_power_of_2(count)
    block_best = triton.next_power_of_2(num_blocks * count)
    parents = None
    if frontier is not None and frontier_seen is not None:
        parents = (frontier, frontier_score, frontier_seen.view(torch.uint8))
    _grow[(batch,)](
        (best, best_ids, sums),
        parents,
        (candidates, scores),
        (following, score, seen.view(torch.uint8)),
        rows,
        num_blocks,
        columns,
        offset,
        scores.shape[1],
        width,
        batch,
        count=count,
        block_rows=block_rows,
        block_count=block_count,
        block_best=block_best,
        block_parts=triton.next_power_of_2(num_blocks),
        block_columns=triton.next_power_of_2(columns + max(width, 1)),
        num_warps=8,
    )
    return following, score, seen


def pick(
    token_ids: Tensor, parents: Tensor, slots: Tensor, depth: Tensor, rank: Tensor, scores: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """See `engine.decoding.tree_operators`."""
    batch, total = scores.shape
    tree = token_ids.new_empty(5, batch, count)
    kept = scores.new_empty(batch, count)
    _pick[(batch,)](
        token_ids,
        parents,
        slots,
        depth,
        rank,
        scores,
        tree,
        kept,
        total,
        count,
        batch,
        block=triton.next_power_of_2(total),
        chunk=CHUNK,
        num_warps=8,
    )
    return tree, kept


def ancestors(parents: Tensor) -> Tensor:
    """See `engine.decoding.tree_operators`."""
    batch, nodes = parents.shape
    above = torch.empty(batch, nodes + 1, nodes + 1, dtype=torch.bool, device=parents.device)
    block = triton.next_power_of_2(nodes + 1)
    _ancestors[(batch,)](parents, above.view(torch.uint8), nodes, parents.stride(0), block=block, num_warps=4)
    return above


def descend(
    choices: Tensor, token_ids: Tensor, parents: Tensor, rank: Tensor, levels: int
) -> tuple[Tensor, Tensor]:
    """See `engine.decoding.tree_operators`."""
    batch, nodes = token_ids.shape
    path, counts = choices.new_empty(2, batch, levels), choices.new_empty(2, batch)
    block = triton.next_power_of_2(nodes)
    given = [each.contiguous() for each in (choices, token_ids, parents, rank)]
    _descend[(batch,)](*given, path, counts, nodes, levels, batch, block=block, num_warps=1)
    return path, counts


@triton.jit
@no_type_check
def _normalizer(sums, sums_stride, place, has_row, num_blocks, block_parts: tl.constexpr):
    """The log of each row's sum of exponentials."""
    part = tl.arange(0, block_parts)
    is_part = has_row[:, None] & (part < num_blocks)[None, :]
    of_part = place[:, None] * num_blocks + part[None, :]
    tops = tl.load(sums + of_part, mask=is_part, other=float("-inf"))
    totals = tl.load(sums + sums_stride + of_part, mask=is_part, other=0.0)
    top = tl.where(has_row, tl.max(tops, 1), 0.0)
    return top + tl.log(tl.sum(totals * tl.exp(tops - top[:, None]), 1))


@triton.jit
@no_type_check
def _num_before(other, other_at, score, at):
    """How many of the others stand before each: by falling score, ties by place."""
    is_equal = other[None, :] == score[:, None]
    before = (other[None, :] > score[:, None]) | (is_equal & (other_at[None, :] < at[:, None]))
    return tl.sum(before.to(tl.int32), 1)


@triton.jit(do_not_specialize=("rows", "num_blocks", "columns", "offset", "total", "width", "batch"))
@no_type_check
def _grow(
    level,
    frontier,
    written,
    expanded,
    rows,
    num_blocks,
    columns,
    offset,
    total,
    width,
    batch,
    count: tl.constexpr,
    block_rows: tl.constexpr,
    block_count: tl.constexpr,
    block_best: tl.constexpr,
    block_parts: tl.constexpr,
    block_columns: tl.constexpr,
):
    """A level of one sample: its children, their scores, and the best of them, which the next level expands.

    `frontier` and `expanded`: the nodes that this level and the next expand (token, number and parent), their scores,
    and which columns each sees; of the root none.
    """
    best, best_ids, sums = level
    candidates, scores = written
    following, following_score, following_seen = expanded
    sample = tl.program_id(0)
    row = tl.arange(0, block_rows)
    has_row = row < rows
    place = sample * rows + row
    normalizer = _normalizer(sums, batch * rows * num_blocks, place, has_row, num_blocks, block_parts)
    each = tl.arange(0, block_best)
    of_best = place[:, None] * (num_blocks * count) + each[None, :]
    is_best = has_row[:, None] & (each < num_blocks * count)[None, :]
    values = tl.load(best + of_best, mask=is_best, other=float("-inf"))
    number = row * 0
    path = tl.full((block_rows,), 1.0, tl.float32)
    if frontier is not None:
        number = tl.load(frontier[0] + batch * rows + place, mask=has_row, other=0).to(tl.int32)
        path = tl.load(frontier[1] + place, mask=has_row, other=0.0)
    child = tl.arange(0, block_count)[None, :]
    all_scores = tl.full((block_rows, block_count), float("-inf"), tl.float32)
    all_ids = tl.zeros((block_rows, block_count), tl.int64)
    first = sample * total + offset
    for index in tl.static_range(count):
        value, at = tl.max(values, 1, return_indices=True, return_indices_tie_break_left=True)
        token = tl.load(best_ids + place * (num_blocks * count) + at, mask=has_row, other=0)
        score = path * tl.exp(value - normalizer)
        # what is no number stands last, and still somewhere
        score = tl.where(score == score, score, 0.0)
        spot = first + row * count + index
        tl.store(candidates + spot, token, mask=has_row)
        tl.store(candidates + batch * total + spot, number.to(tl.int64), mask=has_row)
        tl.store(scores + spot, score, mask=has_row)
        all_scores = tl.where(child == index, score[:, None], all_scores)
        all_ids = tl.where(child == index, token[:, None], all_ids)
        values = tl.where(each[None, :] == at[:, None], float("-inf"), values)
    lane = tl.arange(0, block_rows * block_count)
    parent, position = lane // block_count, lane // block_count * count + lane % block_count
    is_child = (parent < rows) & (lane % block_count < count)
    score = tl.where(is_child, tl.reshape(all_scores, (block_rows * block_count,)), float("-inf"))
    token = tl.reshape(all_ids, (block_rows * block_count,))
    order = _num_before(score, lane, score, lane)
    chosen = is_child & (order < width)
    slot = tl.where(chosen, columns + order, -1).to(tl.int64)
    tl.store(candidates + 2 * batch * total + first + position, slot, mask=is_child)
    spot = sample * width + order
    tl.store(following + spot, token, mask=chosen)
    tl.store(following + batch * width + spot, (offset + position + 1).to(tl.int64), mask=chosen)
    tl.store(following + 2 * batch * width + spot, parent.to(tl.int64), mask=chosen)
    tl.store(following_score + spot, score, mask=chosen)
    column = tl.arange(0, block_columns)[None, :]
    is_seen = column - columns == order[:, None]
    if frontier is not None:
        above = frontier[2] + (sample * rows + parent[:, None]) * columns + column
        is_seen = is_seen | (tl.load(above, mask=chosen[:, None] & (column < columns), other=0) != 0)
    into = following_seen + spot[:, None] * (columns + width) + column
    tl.store(into, is_seen.to(tl.uint8), mask=chosen[:, None] & (column < columns + width))


@triton.jit(do_not_specialize=("total", "count", "batch"))
@no_type_check
def _pick(
    token_ids,
    parents,
    slots,
    depth,
    rank,
    scores,
    tree,
    kept,
    total,
    count,
    batch,
    block: tl.constexpr,
    chunk: tl.constexpr,
):
    """The best nodes of one sample, in their order; ties to the earlier."""
    sample = tl.program_id(0)
    at = tl.arange(0, block)
    inside = at < total
    place = sample * total + at
    score = tl.load(scores + place, mask=inside, other=float("-inf"))
    parent = tl.load(parents + place, mask=inside, other=0).to(tl.int32)
    above = tl.maximum(parent - 1, 0)
    score_above = tl.load(scores + sample * total + above, mask=inside, other=float("-inf"))
    order, order_above = at * 0, at * 0
    for first in range(0, total, chunk):
        other_at = first + tl.arange(0, chunk)
        # of none behind the last
        other = tl.load(scores + sample * total + other_at, mask=other_at < total, other=float("-inf"))
        order += _num_before(other, other_at, score, at)
        order_above += _num_before(other, other_at, score_above, above)
    chosen = inside & (order < count)
    into = tree + sample * count + order
    step = batch * count
    tl.store(into, tl.load(token_ids + place, mask=chosen, other=0), mask=chosen)
    number = tl.where((parent > 0) & (order_above < count), order_above + 1, 0)
    tl.store(into + step, number.to(tl.int64), mask=chosen)
    tl.store(into + 2 * step, tl.load(depth + place, mask=chosen, other=0), mask=chosen)
    tl.store(into + 3 * step, tl.load(rank + place, mask=chosen, other=0), mask=chosen)
    tl.store(into + 4 * step, tl.load(slots + place, mask=chosen, other=0), mask=chosen)
    tl.store(kept + sample * count + order, score, mask=chosen)


@triton.jit(do_not_specialize=("nodes", "stride"))
@no_type_check
def _ancestors(parents, above, nodes, stride, block: tl.constexpr):
    """Follows all nodes of one sample upwards at once."""
    sample = tl.program_id(0)
    node = tl.arange(0, block)
    column = node[None, :]
    current = node
    marked = column == node[:, None]
    for _ in range(nodes):
        is_node = (current > 0) & (current <= nodes)
        current = tl.load(parents + sample * stride + current - 1, mask=is_node, other=0).to(tl.int32)
        marked = marked | (column == current[:, None])
    count = nodes + 1
    place = above + (sample * count + node[:, None]) * count + column
    tl.store(place, marked.to(tl.uint8), mask=(node < count)[:, None] & (column < count))


@triton.jit(do_not_specialize=("nodes", "levels", "batch"))
@no_type_check
def _descend(choices, token_ids, parents, rank, path, counts, nodes, levels, batch, block: tl.constexpr):
    """From the root to the child that is the target's choice, while there is one: `engine.decoding.verify`."""
    sample = tl.program_id(0)
    node = tl.arange(0, block)
    inside = node < nodes
    place = sample * nodes + node
    token = tl.load(token_ids + place, mask=inside, other=-1)
    parent = tl.load(parents + place, mask=inside, other=-1).to(tl.int32)
    is_second = tl.load(rank + place, mask=inside, other=0) > 1
    current = sample * 0
    accepted, second = current, current
    for level in range(levels):
        choice = tl.load(choices + sample * (nodes + 1) + current)
        tl.store(path + sample * levels + level, current.to(tl.int64))
        tl.store(path + (batch + sample) * levels + level, choice)
        chosen = inside & (parent == current) & (token == choice)
        following = tl.min(tl.where(chosen, node + 1, nodes + 1), 0)
        accepted += (following <= nodes).to(tl.int32)
        second += tl.max((chosen & is_second).to(tl.int32), 0)
        current = tl.where(following <= nodes, following, current)
    tl.store(counts + sample, accepted.to(tl.int64))
    tl.store(counts + batch + sample, second.to(tl.int64))
