"""Attention of decode steps by lengths: no bias, no view of the longest sample, no shape that changes with either.

The operator is a kernel on CUDA (`engine.cuda.attention_kernel`) and library calls elsewhere; it is defined by
`engine.cuda.row_operators`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .backends import SHARE_BIAS, sdpa_attention

MAX_HEAD_SIZE = 128
"Of the kernel."


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What a tree's tokens see: all positions before `base`, and some of the columns behind them."""

    base: Int[Tensor, " B"]
    "position of the first column; of a chain, of the first of its tokens"
    seen: Bool[Tensor, "B n t"] | None = None
    "the columns that each token sees; None: a chain, where it is those up to itself"
    depth: Int[Tensor, "B t"] | None = None
    "of the columns, where a window counts by it"
    own_depth: Int[Tensor, "B n"] | None = None
    "of the tokens, the first the shallowest"


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
    """Attend as torch does where a bias says who sees what, as in prefills; decode steps take `attend_by_length`."""
    return sdpa_attention(q, keys, values, bias, rows=rows, scaling=scaling, softcap=softcap)


SHARE_BIAS.add(split_attention)


def takes_lengths(attention: object) -> bool:
    """Whether decode steps attend by lengths."""
    return attention is split_attention


def attend_by_length(
    q: Float[Tensor, "N R E"],
    keys: Float[Tensor, "N C E"],
    values: Float[Tensor, "N C E"],
    marks: Marks,
    *,
    tokens: int,
    window: int | None,
    scaling: float,
    softcap: float | None,
) -> Float[Tensor, "M HE"]:
    """Attend over as much of the cache as each sample has; return the outputs token by token, heads behind one another.

    Args:
        q: of each (sample, KV head), the R / tokens queries of every token behind one another.
        keys: of whole slots.
        values: likewise.
        marks: who sees what.
        tokens: n, of each sample.
        window: how many tokens back a token sees, itself included; None: all.
        scaling: of scores.
        softcap: bounds them, as of `engine.attention.backends.Attention`.
    """
    depths = (None, None) if window is None else (marks.depth, marks.own_depth)
    given = (q, keys, values, marks.base, marks.seen, *depths)
    return torch.ops.rlhfspec.attend(*given, tokens, window, scaling, softcap)
