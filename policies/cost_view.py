"""The cost model at one batch size and context, as look-up tables: what a decode step's decisions read.

Predictions are corrected by slow factors (`policies.recalibration`). Tables are kept by batch and rounded context.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiles.cost import CostModel, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class CostView:
    """Seconds at `num_samples` samples; arrays are indexed by count."""

    num_samples: int
    context_tokens: int
    uniform_s: np.ndarray
    "[n + 1] verify and rest with n nodes for every sample"
    tokens_s: np.ndarray
    "[N + 1] the part of a ragged verification that grows with the total number of nodes"
    widest_s: np.ndarray
    "[n + 1] the part that grows with the widest sample, constants included"
    draft_s: np.ndarray
    "[levels + 1] to draft so many levels; 0 is plain decoding"

    def corrected(self, *, draft: float, verify: float) -> CostView:
        """Multiply with the factors of this run; what is neither drafting nor verification is little."""
        return CostView(
            num_samples=self.num_samples,
            context_tokens=self.context_tokens,
            uniform_s=self.uniform_s * verify,
            tokens_s=self.tokens_s * verify,
            widest_s=self.widest_s * verify,
            draft_s=self.draft_s * draft,
        )


def cost_view(
    cost: CostModel,
    *,
    num_samples: int,
    context_tokens: int,
    width: int,
    max_nodes: int,
    max_levels: int,
) -> CostView:
    """Evaluate the model for one batch and one tree width."""
    nodes = np.arange(max_nodes + 1)
    levels = np.arange(max_levels + 1)
    total = np.arange(num_samples * max_nodes + 1)
    just_ragged = np.maximum(num_samples * nodes - 1, 0)

    def shape(num_nodes: np.ndarray | float, widest: np.ndarray | float, depth: np.ndarray | float) -> Shape:
        return Shape(
            num_samples=float(num_samples),
            context_tokens=float(context_tokens),
            num_nodes=num_nodes,
            widest=widest,
            levels=depth,
            width=float(width),
        )

    # one evaluation: uniform, then ragged by total at no width, then just short of uniform
    widest = np.concatenate([nodes, np.zeros_like(total), nodes])
    verify_s = cost.verify_s(shape(np.concatenate([num_samples * nodes, total, just_ragged]), widest, 1.0))
    uniform_s, tokens_s, ragged_s = np.split(verify_s, [len(nodes), len(nodes) + len(total)])
    rest = cost.rest_s(shape(num_samples * nodes, nodes, 1.0))
    # at a given total the widest sample adds the rest
    widest_s = ragged_s - tokens_s[just_ragged] + tokens_s[0]
    return CostView(
        num_samples=num_samples,
        context_tokens=context_tokens,
        uniform_s=uniform_s + rest,
        tokens_s=tokens_s - tokens_s[0],
        widest_s=widest_s + rest,
        draft_s=cost.draft_s(shape(0.0, 0.0, levels)),
    )
