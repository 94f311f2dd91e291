"""The choice of a draft's shape (design 3.2): expected tokens over predicted seconds, for everything on the table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhfspec.policies.drafting.cost_view import CostView
from rlhfspec.policies.drafting.track_record import TrackRecord
from rlhfspec.profiles.profile import YieldCurve

MOST_GAIN = 2.0
"A tree yields at most so many times what it did in the profile."


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A shape, how far it should be drafted, and what the batch yields with it."""

    branching: int
    width: int
    levels: int
    num_nodes: int
    goodput: float
    "tokens per second"
    tokens: float = 1.0
    "of a decode step, a sample"

    @property
    def kind(self) -> int:
        """Branching, 0 for plain decoding: what a budget of this choice says."""
        return self.branching if self.num_nodes else 0


class ShapeTable:
    """The profile's yield curves, those of one width stacked: a choice is a few array operations."""

    def __init__(self, yields: tuple[YieldCurve, ...], max_depth: int) -> None:
        self.chain_curve = np.asarray(yields[0].curve)
        self._trees: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}
        for width in sorted({curve.width for curve in yields if curve.branching > 1}):
            fitting = [curve for curve in yields if curve.width == width and curve.levels <= max_depth]
            if fitting:
                self._trees[width] = (
                    fitting[0].branching,
                    np.array([curve.levels for curve in fitting]),
                    np.array([curve.curve for curve in fitting]),
                )

    @property
    def widths(self) -> list[int]:
        """Widths that a choice compares."""
        return [1, *self._trees]

    def best(self, views: dict[int, CostView], path: np.ndarray, record: TrackRecord) -> Choice:
        """Expected tokens over predicted seconds, for every shape in view and number of nodes; n = 0 is plain.

        `path` is a chain's acceptance of the whole way to each level.
        """
        view = views[1]
        chain = np.concatenate([[0.0], path.cumsum()])
        nodes = np.arange(min(len(chain), len(view.uniform_s), len(view.draft_s)))
        goodput = view.num_samples * (1.0 + chain[nodes]) / (view.uniform_s[nodes] + view.draft_s[nodes])
        goodput[0] *= record.factor(0, view.num_samples)
        goodput[1:] *= record.factor(1, view.num_samples)
        most = int(goodput.argmax())
        best = Choice(
            branching=1,
            width=1,
            levels=most,
            num_nodes=most,
            goodput=float(goodput[most]),
            tokens=1.0 + float(chain[most]),
        )
        # trees gain and lose with the chain; from next to nothing they gain no multiple
        head = min(len(chain) - 1, 8)
        moved = min(chain[head] / max(self.chain_curve[head], 1e-9), MOST_GAIN)
        for width, (branching, levels, curves) in self._trees.items():
            if width not in views:
                continue
            view = views[width]
            count = min(curves.shape[1], len(view.uniform_s))
            tokens = view.num_samples * (1.0 + moved * curves[:, 1:count])
            rates = tokens / (view.uniform_s[1:count] + view.draft_s[levels][:, None])
            row, column = divmod(int(rates.argmax()), count - 1)
            rate = float(rates[row, column]) * record.factor(branching, view.num_samples)
            if rate > best.goodput:
                best = Choice(
                    branching=branching,
                    width=width,
                    levels=int(levels[row]),
                    num_nodes=column + 1,
                    goodput=rate,
                    tokens=1.0 + float(moved * curves[row, column + 1]),
                )
        return best
