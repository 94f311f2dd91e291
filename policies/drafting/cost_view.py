"""The cost model at one batch size and context, as look-up tables: what a decode step's decisions read.

The context enters every phase linearly, so that what is evaluated once for a batch serves every context. Predictions
are corrected by slow factors (`policies.drafting.recalibration`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...profiles.cost import CostModel, Shape

FAR_CONTEXT = 1 << 20
"Tokens: the second point of the lines in the context."


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


class BatchCosts:
    """The cost model for one batch and one tree width, whatever the context."""

    def __init__(
        self, cost: CostModel, *, num_samples: int, width: int, max_nodes: int, max_levels: int
    ) -> None:
        """Evaluate the model with no context and with some."""
        self._none, far = (
            _evaluate(cost, num_samples, context, width, max_nodes, max_levels)
            for context in (0, FAR_CONTEXT)
        )
        self._uniform_s = (far.uniform_s - self._none.uniform_s) / FAR_CONTEXT
        self._widest_s = (far.widest_s - self._none.widest_s) / FAR_CONTEXT
        self._draft_s = (far.draft_s - self._none.draft_s) / FAR_CONTEXT
        "seconds of each table by token of context"

    def at(self, context_tokens: int, *, draft: float = 1.0, verify: float = 1.0) -> CostView:
        """Return the tables at a context of the whole batch, each phase multiplied by this run's factor.

        What is neither drafting nor verification is little and follows the latter.
        """
        none = self._none
        return CostView(
            num_samples=none.num_samples,
            context_tokens=context_tokens,
            uniform_s=(none.uniform_s + self._uniform_s * context_tokens) * verify,
            tokens_s=none.tokens_s * verify,
            widest_s=(none.widest_s + self._widest_s * context_tokens) * verify,
            draft_s=(none.draft_s + self._draft_s * context_tokens) * draft,
        )


def step_at(seconds: np.ndarray, count: int) -> float:
    """What one more costs at a count; the last step goes on."""
    count = min(count, len(seconds) - 2)
    return float(seconds[count + 1] - seconds[count])


def _evaluate(
    cost: CostModel, num_samples: int, context_tokens: int, width: int, max_nodes: int, max_levels: int
) -> CostView:
    """The model's tables at one context."""
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

    uniform_s = cost.verify_s(shape(num_samples * nodes, nodes, 1.0))
    # ragged, which no recording serves: by total at no width, then just short of uniform
    as_they_come, widest = replace(cost, recorded_samples=()), np.concatenate([np.zeros_like(total), nodes])
    verify_s = as_they_come.verify_s(shape(np.concatenate([total, just_ragged]), widest, 1.0))
    tokens_s, ragged_s = np.split(verify_s, [len(total)])
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
