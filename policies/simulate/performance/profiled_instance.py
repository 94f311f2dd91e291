"""What a measured profile says of an instance beside its rate: prompts, and tokens that a last decode step wastes."""

from __future__ import annotations

import numpy as np

from policies.drafting.cost_view import BatchCosts
from policies.drafting.shapes import ShapeTable
from policies.drafting.track_record import TrackRecord
from profiles.cost import CostModel, Shape
from profiles.profile import Profile

MOST_NODES = 16
"As `rate_curve_from_profile` takes them."


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
    shapes = ShapeTable(profile.yields, MOST_NODES)
    path = np.clip(np.diff(profile.yields[0].curve)[:MOST_NODES], 0.0, 1.0)
    views = {
        width: BatchCosts(
            profile.cost, num_samples=samples, width=width, max_nodes=MOST_NODES, max_levels=MOST_NODES
        ).at(samples * context_tokens)
        for width in shapes.widths
    }
    choice = shapes.best(views, path, TrackRecord(doubt=0.0))
    if choice.branching > 1:
        # of trees only the mean is known
        return (choice.tokens - 1.0) / 2.0
    at_least = np.concatenate([[1.0], path[: choice.levels]])
    squares = float(((2.0 * np.arange(len(at_least)) + 1.0) * at_least).sum())
    return (squares / float(at_least.sum()) - 1.0) / 2.0


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
