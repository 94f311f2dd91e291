"""Attention of decode steps by lengths: no bias, no view of the longest sample, no shape that changes with either.

The operator (`engine.cuda.row_operators`) is a kernel on CUDA and library calls elsewhere.
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
    column_depth: Int[Tensor, "B t"] | None = None
    "a window counts by it, and by nothing else"
    token_depth: Int[Tensor, "B n"] | None = None
    "likewise; their columns' own, the first the shallowest"


@dataclass(frozen=True, slots=True)
class SplitAttention:
    """A back end with two entrances: torch's by a bias, as in prefills, and decode steps by lengths."""

    __call__ = staticmethod(sdpa_attention)

    def by_length(
        self,
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
        """Attend over what each sample has cached; return outputs token by token, heads behind one another.

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
        depths = (None, None) if window is None else (marks.column_depth, marks.token_depth)
        given = (q, keys, values, marks.base, marks.seen, *depths)
        return torch.ops.rlhfspec.attend(*given, tokens, window, scaling, softcap)


split_attention = SplitAttention()
SHARE_BIAS.add(split_attention)
