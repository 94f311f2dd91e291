"""The parts of a decoder layer between its products, as operators of torch: kernels on CUDA, library calls elsewhere.

What counts calls (`rlhfspec bench device-ops`) counts the same on every device. Bodies of library calls say what is
computed, and are what the kernels are compared with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention.backends import sdpa_attention
from ..attention.packing import unpack_queries
from ..attention.visibility import as_bias, chain_visibility, tree_visibility
from ..triton_here import define


def norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """Return x over its root mean square, times the gain; without a gain x / sqrt(|x|^2 + H eps)."""
    if gain is not None:
        return F.rms_norm(x, (x.shape[-1],), gain, eps)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + x.shape[-1] * eps)).to(x.dtype)


def gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of [gate, up]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def turn(
    qkv: Tensor,
    positions: Tensor,
    cells: Tensor,
    rows: Tensor,
    num_tokens: int,
    rope: Tensor,
    head_gain: Tensor | None,
    eps: float,
    heads: int,
) -> Tensor:
    """Norm and turn queries and keys, store keys and values, return the queries as attention takes them."""
    size, count = cells.shape[1], len(rows) // (2 * heads)
    x = qkv[:count].to(torch.float32, copy=True).view(count, heads, -1, size)
    if head_gain is not None:
        queries_key = x[:, :, :-1]
        queries_key.copy_(F.rms_norm(queries_key, (size,), None, eps).mul_(head_gain))
    turned = torch.view_as_complex(rope)[positions[:count]]
    torch.view_as_complex(x.view(*x.shape[:3], -1, 2))[:, :, :-1].mul_(turned[:, None, None])
    x = x.to(cells.dtype)
    cells.index_put_((rows,), x[:, :, -2:].reshape(-1, size))
    queries = x[:, :, :-2].unflatten(0, (-1, num_tokens)).transpose(1, 2)
    # a new tensor in any case: operators do not hand on what they were given
    return queries.flatten(2, 3).flatten(0, 1).clone(memory_format=torch.contiguous_format)


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
    """Attend as `engine.attention.by_length.SplitAttention.by_length` says."""
    rows, view = q.shape[1], keys.shape[1]
    if seen is None:
        visible = chain_visibility(base, tokens, view, window=window)
    else:
        visible = tree_visibility(base, seen, column_depth, view, window=window, own_depth=token_depth)
    bias = as_bias(visible, heads=1, queries=rows // tokens).to(q.dtype)
    out = sdpa_attention(q, keys, values, bias, rows=rows, scaling=scaling, softcap=softcap)
    # a new tensor in any case, as of `turn`
    return unpack_queries(out, len(base), tokens, len(base) * tokens).clone()


def _attend_meta(q: Tensor, keys: Tensor, values: Tensor, base: Tensor, *rest: Any) -> Tensor:
    rows = len(base) * rest[3]
    return q.new_empty(rows, q.numel() // rows)


def lay_rows(parts: list[Tensor], order: Tensor | None, matrix: Tensor) -> None:
    """Write rows [N, K] of the parts behind one another, in `order` or as they stand, into the matrix [K, N]."""
    rows = torch.cat(parts)
    matrix.copy_((rows if order is None else rows.index_select(0, order)).t())


def hold_rows(parts: list[Tensor], order: Tensor | None, matrix: Tensor) -> Tensor:
    """Whether a matrix holds, bit for bit, what `lay_rows` writes: bool []."""
    laid = torch.empty_like(matrix)
    lay_rows(parts, order, laid)
    return (laid.view(torch.int8) == matrix.view(torch.int8)).all()


def _turn_meta(
    qkv: Tensor,
    positions: Tensor,
    cells: Tensor,
    rows: Tensor,
    num_tokens: int,
    rope: Tensor,
    head_gain: Tensor | None,
    eps: float,
    heads: int,
) -> Tensor:
    size, samples = cells.shape[1], len(rows) // (2 * heads) // num_tokens
    return cells.new_empty(samples * heads, num_tokens * (qkv.shape[1] // (heads * size) - 2), size)


define(
    "norm(Tensor x, Tensor? gain, float eps) -> Tensor",
    "cuda.row_kernels",
    lambda x, *rest: x.new_empty(x.shape),
    norm,
)
define(
    "gated(Tensor gate_up) -> Tensor",
    "cuda.row_kernels",
    lambda x: x.new_empty(len(x), x.shape[1] // 2),
    gated,
)
define(
    "turn(Tensor qkv, Tensor positions, Tensor(a!) cells, Tensor rows, int num_tokens, Tensor rope, "
    "Tensor? head_gain, float eps, int heads) -> Tensor",
    "cuda.row_kernels",
    _turn_meta,
    turn,
)
define(
    "attend(Tensor q, Tensor keys, Tensor values, Tensor base, Tensor? seen, Tensor? column_depth, "
    "Tensor? token_depth, int tokens, int? window, float scaling, float? softcap) -> Tensor",
    "cuda.attention_kernel",
    _attend_meta,
    attend,
)
define(
    "lay_rows(Tensor[] parts, Tensor? order, Tensor(a!) matrix) -> ()",
    "cuda.laying_kernel",
    lambda parts, order, matrix: None,
    lay_rows,
)
define(
    "hold_rows(Tensor[] parts, Tensor? order, Tensor matrix) -> Tensor",
    "cuda.laying_kernel",
    lambda parts, order, matrix: matrix.new_empty((), dtype=torch.bool),
    hold_rows,
)
