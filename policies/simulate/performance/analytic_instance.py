"""An instance from a data sheet: seconds of a decode step with any draft, and the rate curve that policies see.

What is drafted is the project's own choice (`policies.drafting.shapes`), on costs of the roofline instead of measured
ones; or one fixed draft for every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from policies.drafting.cost_view import CostView
from policies.drafting.shapes import ShapeTable
from policies.drafting.track_record import TrackRecord
from policies.reallocation.rate_curve import RateCurve
from policies.simulate.performance.roofline import Roofline
from profiles.profile import YieldCurve

Speculation = Literal["off", "fixed", "adaptive"]
CURVE_POINTS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A drafter, and what it yields."""

    roofline: Roofline
    accepted: np.ndarray
    "[levels + 1] expected nodes of chains; its last place is the deepest that is tried"
    level_s: float
    step_s: float
    nodes: int
    "of the fixed draft"
    levels: int
    width: int
    tokens: float
    "of a step of the fixed draft, the target's own included"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticInstance:
    """A target, and a drafter or none."""

    target: Roofline
    draft: Draft | None = None

    def plain_s(self, samples: float, context_tokens: float) -> float:
        """Seconds of a plain decode step; `context_tokens` of all samples together."""
        return self.target.forward_s(samples, 1.0, context_tokens)

    def speculative_s(
        self, samples: float, context_tokens: float, *, nodes: int, levels: int, width: int = 1
    ) -> float:
        """Seconds of a decode step that drafts so many levels and verifies so many nodes of each sample."""
        return self.target.forward_s(samples, nodes + 1.0, context_tokens) + self.draft_s(
            samples, context_tokens, levels=levels, width=width
        )

    def draft_s(self, samples: float, context_tokens: float, *, levels: int, width: int = 1) -> float:
        """Seconds that drafting adds to a step."""
        if self.draft is None or not levels:
            return 0.0
        level_s = self.draft.roofline.forward_s(samples, width, context_tokens) + self.draft.level_s
        return self.draft.step_s + levels * level_s

    def best_chain(self, samples: int, context_tokens: float) -> tuple[int, float]:
        """Levels of the chain that the project's choice takes, and tokens a second of the whole batch."""
        if self.draft is None:
            return 0, samples / self.plain_s(samples, context_tokens)
        deepest = len(self.draft.accepted) - 1
        lengths = range(deepest + 1)
        view = CostView(
            num_samples=samples,
            context_tokens=int(context_tokens),
            uniform_s=np.array([self.target.forward_s(samples, n + 1.0, context_tokens) for n in lengths]),
            tokens_s=np.zeros(1),
            widest_s=np.zeros(1),
            draft_s=np.array([self.draft_s(samples, context_tokens, levels=n) for n in lengths]),
        )
        chain = YieldCurve(branching=1, width=1, levels=deepest, curve=tuple(self.draft.accepted.tolist()))
        table = ShapeTable((chain,), deepest)
        choice = table.best({1: view}, np.diff(self.draft.accepted), TrackRecord(doubt=0.0))
        return choice.levels, choice.goodput

    def rate(self, samples: int, context_tokens: float, speculation: Speculation) -> float:
        """Tokens a second of the whole batch."""
        if self.draft is None or speculation == "off":
            return samples / self.plain_s(samples, context_tokens)
        if speculation == "adaptive":
            return self.best_chain(samples, context_tokens)[1]
        fixed = self.draft
        seconds = self.speculative_s(
            samples, context_tokens, nodes=fixed.nodes, levels=fixed.levels, width=fixed.width
        )
        return samples * fixed.tokens / seconds

    def rate_curve(self, *, context_tokens: int, max_samples: int, speculation: Speculation) -> RateCurve:
        """Goodput over samples; what contexts cost is the slope from `context_tokens` a sample to twice that."""
        batches = np.unique(np.rint(np.geomspace(1, max_samples, CURVE_POINTS)).astype(int)).tolist()
        rates: list[float] = []
        slopes: list[float] = []
        for batch in batches:
            near, far = (
                self.rate(batch, batch * held, speculation) for held in (context_tokens, 2 * context_tokens)
            )
            rates.append(near)
            slopes.append(max(batch / far - batch / near, 0.0) / (batch * context_tokens))
        return RateCurve(
            batches,
            rates,
            context_tokens=[batch * context_tokens for batch in batches],
            context_token_s=slopes,
        )
