"""The parts of a decoder layer between its products, as operators of torch: kernels on CUDA, library calls elsewhere.

One call is one launch; what counts calls (`rlhfspec bench device-ops`) counts the same on every device. Bodies of
library calls say what is computed, and are what the kernels are compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention.backends import sdpa_attention
from ..attention.packing import unpack_queries
from ..attention.visibility import as_bias, chain_visibility, tree_visibility

_LIBRARY = torch.library.Library("rlhfspec", "DEF")
_LIBRARY.define("norm(Tensor x, Tensor? gain, float eps) -> Tensor")
_LIBRARY.define("gated(Tensor gate_up) -> Tensor")
_LIBRARY.define(
    "turn(Tensor qkv, Tensor positions, Tensor(a!) cells, Tensor rows, int num_tokens, Tensor rope, "
    "Tensor? head_gain, float eps, int heads) -> Tensor"
)
_LIBRARY.define(
    "attend(Tensor q, Tensor keys, Tensor values, Tensor base, Tensor? seen, Tensor? depth, Tensor? own_depth, "
    "int tokens, int? window, float scaling, float? softcap) -> Tensor"
)
_LIBRARY.define("lay_rows(Tensor[] parts, Tensor? order, Tensor(a!) matrix) -> ()")
_LIBRARY.define("hold_rows(Tensor[] parts, Tensor? order, Tensor matrix) -> Tensor")


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
    depth: Tensor | None,
    own_depth: Tensor | None,
    tokens: int,
    window: int | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Attend as `engine.attention.by_length.attend_by_length` says."""
    rows, view = q.shape[1], keys.shape[1]
    if seen is None:
        visible = chain_visibility(base, tokens, view, window=window)
    else:
        visible = tree_visibility(base, seen, depth, view, window=window, own_depth=own_depth)
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


def _kernel(name: str) -> Callable[..., Any]:
    """A kernel by its name: Triton is there when it is called, on a GPU alone."""
    module = {"attend": "attention_kernel", "lay_rows": "laying_kernel", "hold_rows": "laying_kernel"}.get(
        name, "row_kernels"
    )
    return lambda *args: getattr(import_module(f"rlhfspec.engine.cuda.{module}"), name)(*args)


for _name, _body, _meta in (
    ("norm", norm, lambda x, gain, eps: x.new_empty(x.shape)),
    ("gated", gated, lambda gate_up: gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)),
    ("turn", turn, _turn_meta),
    ("attend", attend, _attend_meta),
    ("lay_rows", lay_rows, lambda parts, order, matrix: None),
    ("hold_rows", hold_rows, lambda parts, order, matrix: matrix.new_empty((), dtype=torch.bool)),
):
    _LIBRARY.impl(_name, _body, "CPU")
    _LIBRARY.impl(_name, _meta, "Meta")
    _LIBRARY.impl(_name, _kernel(_name), "CUDA")
