"""An instance from a data sheet: seconds of a decode step with any draft, and the rate curve that policies see.

What is drafted is the project's own choice (`policies.drafting.shape_search`), on costs of the roofline instead of
measured ones; or one fixed draft for every batch. And what a measured profile says beside its rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...profiles.cost import CostModel, Shape
from ...profiles.profile import Profile, YieldCurve
from ..drafting.cost_view import BatchCosts, CostView
from ..drafting.recalibration import TrackRecord
from ..drafting.shape_search import Choice, ShapeTable
from ..reallocation.rate_curve import RateCurve
from .roofline import Roofline

Speculation = Literal["off", "fixed", "adaptive"]
CURVE_POINTS = 40
MOST_NODES = 16
"Of a profile's drafts, as `rate_curve_from_profile` takes them."


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

    def step_tokens(self, samples: int, context_tokens: float, speculation: str) -> float:
        """Tokens of each sample in a decode step."""
        if self.draft is None or speculation == "off":
            return 1.0
        if speculation == "fixed":
            return self.draft.tokens
        return 1.0 + float(self.draft.accepted[self.best_chain(samples, context_tokens)[0]])

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


def even_acceptance(length: float, depth: int) -> float:
    """Acceptance of each level, given the one before it, with which a chain of `depth` yields `length` tokens a step.

    That is the p of 1 + p + .. + p^depth = length; 1 where length is depth + 1.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2.0
        if float((middle ** np.arange(depth + 1)).sum()) < length:
            low = middle
        else:
            high = middle
    return high


def accepted_nodes(acceptance: Sequence[float], levels: int) -> np.ndarray:
    """[levels + 1] expected accepted nodes of chains of 0, 1, .. levels.

    Args:
        acceptance: of each level given those before it; the last one goes on.
        levels: of the longest chain.
    """
    given = np.array([acceptance[min(level, len(acceptance) - 1)] for level in range(levels)])
    return np.concatenate([[0.0], np.cumsum(np.cumprod(given))])


def prompt_cost(cost: CostModel, prompt_tokens: int) -> tuple[float, float]:
    """Seconds of a prompt whatever its length, and of each of its tokens.

    A prompt is computed as a sample's draft is verified: one forward of as many rows.
    """
    one, whole = (float(_verify_s(cost, rows)) for rows in (1, max(prompt_tokens, 2)))
    token_s = max(whole - one, 0.0) / (max(prompt_tokens, 2) - 1)
    return max(one - token_s, 0.0), token_s


def last_step_tokens(profile: Profile, *, samples: int, context_tokens: int) -> float:
    """Tokens that the last decode step of a sample makes beyond its end, on average; 0 for plain decoding.

    A response ends anywhere within a step of X tokens, and a long step is met more often: (E[X^2] / E[X] - 1) / 2.
    """
    choice, path = profiled_choice(profile, samples=samples, context_tokens=context_tokens)
    if choice.branching > 1:
        # of trees only the mean is known
        return (choice.tokens - 1.0) / 2.0
    at_least = np.concatenate([[1.0], path[: choice.levels]])
    squares = float(((2.0 * np.arange(len(at_least)) + 1.0) * at_least).sum())
    return (squares / float(at_least.sum()) - 1.0) / 2.0


def profiled_choice(profile: Profile, *, samples: int, context_tokens: int) -> tuple[Choice, np.ndarray]:
    """The drafts that the project chooses by a profile, and the acceptance by level that it goes by."""
    shapes = ShapeTable(profile.yields, MOST_NODES)
    path = np.clip(np.diff(profile.yields[0].curve)[:MOST_NODES], 0.0, 1.0)
    views = {
        width: BatchCosts(
            profile.cost, num_samples=samples, width=width, max_nodes=MOST_NODES, max_levels=MOST_NODES
        ).at(samples * context_tokens)
        for width in shapes.widths
    }
    return shapes.best(views, path, TrackRecord(doubt=0.0)), path


def _verify_s(cost: CostModel, rows: int) -> np.ndarray:
    return cost.verify_s(
        Shape(
            num_samples=1.0,
            context_tokens=float(rows),
            num_nodes=rows - 1.0,
            widest=rows - 1.0,
            levels=0.0,
            width=1.0,
        )
    )
