"""Attention of anchors to the cells of their past and to their own levels, by pieces that are a few milliseconds long.

Scores are computed anew for the gradient instead of being held: what is held grows with the sequence, not its square.

Source: Dao et al. 2022, 'FlashAttention', section 3.1 (recomputation in the backward pass).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhfspec.learning.drafts.operations import Products, pieces_of

PIECE_SCORES = 1 << 18
"Of one piece, all attention heads together: some milliseconds of a core for its gradient."
LEAST_ROWS = 4
"Of a piece, however long the past."


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Keys and values that the anchors of one stretch attend to; L is how many own levels each has."""

    keys: Float[Tensor, "n kv E"]
    "of the sequence's cells from its first"
    values: Float[Tensor, "n kv E"]
    own_keys: Float[Tensor, "m kv L E"]
    own_values: Float[Tensor, "m kv L E"]


def attend(
    products: Products, query: Float[Tensor, "m heads E"], seen: Seen, first_anchor: int
) -> Float[Tensor, "m attended"]:
    """Return what each anchor's heads read, side by side.

    The query of row i sees the cells up to `first_anchor` + i, and its own levels. A look is taken before every piece,
    forward and backward; raises Stopped.
    """
    tensors = (seen.keys, seen.values, seen.own_keys, seen.own_values)
    return _Attend.apply(products, first_anchor, query, *tensors)  # type: ignore[return-value]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Products, first_anchor: int, *tensors: Tensor) -> Tensor:
        ctx.products, ctx.first_anchor = products, first_anchor
        ctx.save_for_backward(*tensors)
        parts = []
        for rows, cells in _pieces(first_anchor, tensors[0], tensors[1]):
            products.look()
            parts.append(_attend_piece(first_anchor + rows.start, *_cut(tensors, rows, cells)))
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tensors = ctx.saved_tensors
        found = [torch.zeros_like(each) for each in tensors]
        for rows, cells in _pieces(ctx.first_anchor, tensors[0], tensors[1]):
            ctx.products.look()
            inputs = [each.detach().requires_grad_() for each in _cut(tensors, rows, cells)]
            with torch.enable_grad():
                attended = _attend_piece(ctx.first_anchor + rows.start, *inputs)
            gradients = torch.autograd.grad(attended, inputs, grads[0][rows])
            for total, gradient in zip(_cut(found, rows, cells), gradients, strict=True):
                total += gradient
        return None, None, *found


def _pieces(first_anchor: int, query: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows of queries, and the cells that any of them sees."""
    num_rows = max(LEAST_ROWS, PIECE_SCORES // (query.shape[1] * len(keys)))
    for rows in pieces_of(len(query), num_rows):
        yield rows, slice(0, first_anchor + rows.stop)


def _cut(tensors: Any, rows: slice, cells: slice) -> list[Tensor]:
    query, keys, values, own_keys, own_values = tensors
    return [query[rows], keys[cells], values[cells], own_keys[rows], own_values[rows]]


def _attend_piece(
    first_anchor: int,
    query: Float[Tensor, "m heads E"],
    keys: Float[Tensor, "n kv E"],
    values: Float[Tensor, "n kv E"],
    own_keys: Float[Tensor, "m kv L E"],
    own_values: Float[Tensor, "m kv L E"],
) -> Float[Tensor, "m attended"]:
    num, heads, size = query.shape
    cells, kv = keys.shape[:2]
    # a group of queries shares keys and values: [kv, m, group, E], and with its rows and heads joined
    grouped = (query * size**-0.5).view(num, kv, heads // kv, size).transpose(0, 1)
    joined = grouped.reshape(kv, -1, size)
    scores = (joined @ keys.permute(1, 2, 0)).view(kv, num, -1, cells)
    place = torch.arange(cells, device=query.device)
    hidden = place > first_anchor + place[:num, None]
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    of_own = grouped @ own_keys.permute(1, 0, 3, 2)
    weights = torch.cat([scores, of_own], dim=-1).softmax(dim=-1)
    attended = weights[..., :cells].reshape(kv, -1, cells) @ values.transpose(0, 1)
    attended = attended.view(kv, num, -1, size) + weights[..., cells:] @ own_values.transpose(0, 1)
    return attended.transpose(0, 1).reshape(num, heads * size)
