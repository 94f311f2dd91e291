"""Which cached positions a token sees, and the additive bias that says so to attention."""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .backends import MIN_ROWS

NEG_INF = float("-inf")


def count_up(length: int, device: torch.device) -> Int[Tensor, " C"]:
    """Return 0, 1, .., length - 1, to be read only; a recorded step reads it again, so that it is never given back."""
    return _counted(max(length - 1, 0).bit_length(), device)[:length]


@cache
def _counted(bits: int, device: torch.device) -> Int[Tensor, " C"]:
    return torch.arange(1 << bits, device=device)


def chain_visibility(
    start: Int[Tensor, " B"], num_tokens: int, view: int, *, window: int | None
) -> Bool[Tensor, "B n C"]:
    """Token i of sample b stands at position start[b] + i and sees all positions up to its own."""
    row = start[:, None, None] + count_up(num_tokens, start.device)[:, None]
    column = count_up(view, start.device)
    seen = column <= row
    return seen if window is None else seen & (row - column < window)


def tree_visibility(
    base: Int[Tensor, " B"],
    seen: Bool[Tensor, "B n t"],
    depth: Int[Tensor, "B t"] | None,
    view: int,
    *,
    window: int | None,
    own_depth: Int[Tensor, "B n"] | None = None,
) -> Bool[Tensor, "B n C"]:
    """The last n of a tree's t columns see the `base` positions before it and the columns marked in `seen`.

    Args:
        base: position of the tree's first column.
        seen: visibility among the columns.
        depth: each column's distance from `base` in the conversation; the window counts by it, and nothing else.
        view: C, cached positions in view.
        window: how many tokens back a token sees, itself included; None: all.
        own_depth: of the n; the last columns' by default.
    """
    batch, n, columns = seen.shape
    offset = count_up(view, base.device) - base[:, None]
    inside = (offset >= 0) & (offset < columns)
    column = offset.clamp(0, columns - 1)
    visible = seen.gather(2, column[:, None].expand(batch, n, -1))
    visible = torch.where(inside[:, None], visible, (offset < 0)[:, None])
    if window is None or depth is None:
        return visible
    column_depth = torch.where(offset < 0, offset, depth.gather(1, column))
    own_depth = depth[:, columns - n :] if own_depth is None else own_depth
    return visible & (own_depth[:, :, None] - column_depth[:, None] < window)


def as_bias(seen: Bool[Tensor, "B n C"], *, heads: int, queries: int) -> Float[Tensor, "N R C"]:
    """Return 0 where seen and -inf elsewhere, for queries packed by (sample, KV head), rows token by token.

    One row serves all queries of a single token that share a head. Padding rows up to MIN_ROWS see everything.
    """
    batch, n, view = seen.shape
    bias = torch.where(seen, 0.0, NEG_INF)
    if n == 1:
        return bias.expand(batch, heads, view).reshape(batch * heads, 1, view)
    # one sample's heads share one bias
    heads = 1 if batch == 1 else heads
    bias = bias[:, None, :, None].expand(batch, heads, n, queries, view)
    bias = bias.reshape(batch * heads, n * queries, view)
    missing = MIN_ROWS - n * queries
    return bias if missing <= 0 else torch.nn.functional.pad(bias, (0, 0, 0, missing))
