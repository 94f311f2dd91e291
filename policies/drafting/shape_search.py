"""The search of a shape: what each shape of draft costs for this batch and context, and which has the highest goodput.

Expected tokens over predicted seconds, for everything on the table (design 3.2). It keeps no state but tables; what it
answers, `Chosen`, is what the law goes by until the next plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...profiles.profile import Profile, YieldCurve
from .cost_view import BatchCosts, CostView
from .recalibration import AcceptanceRecalibration, CostRecalibration, TrackRecord

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


MOST_COSTS = 256
"Batches and widths whose costs are kept."
PROBE_DEPTH = 2
"Levels of a probe: a chain for each sample."


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A plan and what it was made from."""

    choice: Choice
    num_samples: int
    "of the batch that it was made for"
    view: CostView
    "costs of the choice, by its track record too: seconds and what one is worth are of one scale"
    chain_view: CostView
    onward: np.ndarray
    "acceptance of a level given the one before, [levels]"
    models_say: float
    "tokens per second of the choice before its track record"
    probe_s: float
    "what a probe costs beyond plain decoding, but for the tokens that the draft cache lacks"


class ShapeSearch:
    """Compares all shapes of the profile."""

    def __init__(self, profile: Profile, *, max_nodes: int, max_depth: int) -> None:
        self._profile = profile
        self._max_nodes = max_nodes
        self._max_depth = max_depth
        self._shapes = ShapeTable(profile.yields, max_depth)
        self._by_profile = AcceptanceRecalibration(np.diff(profile.yields[0].curve)[:max_depth]).path
        self._costs_of = lru_cache(MOST_COSTS)(self._evaluate)

    @property
    def widths(self) -> list[int]:
        """Widths of all shapes; 1 is a chain's and plain decoding's."""
        return self._shapes.widths

    def choose(
        self,
        num_samples: int,
        context_tokens: int,
        *,
        acceptance: AcceptanceRecalibration,
        costs: CostRecalibration,
        record: TrackRecord,
        widths: Iterable[int],
    ) -> Chosen:
        """Return the shape of the highest goodput among those of some widths.

        Args:
            num_samples: running.
            context_tokens: of all of them together.
            acceptance: as this run corrected it.
            costs: likewise.
            record: of what shapes delivered.
            widths: 1 must be among them.
        """

        def view(width: int, slower: float = 1.0) -> CostView:
            of = self._costs_of(num_samples, width)
            return of.at(context_tokens, draft=costs.draft * slower, verify=costs.verify * slower)

        views = {width: view(width) for width in widths}
        onward = acceptance.conditional
        choice = self._shapes.best(views, np.cumprod(onward), record)
        slower = record.ratios(choice.kind, num_samples)[1]
        return Chosen(
            choice=choice,
            num_samples=num_samples,
            view=view(choice.width, slower),
            chain_view=views[1],
            onward=onward,
            models_say=choice.goodput / record.factor(choice.kind, num_samples),
            probe_s=_probe_s(views[1]),
        )

    def undrafted(self, acceptance: AcceptanceRecalibration) -> Chosen:
        """Plain decoding of one sample: what is chosen before the first plan."""
        view = self._costs_of(1, 1).at(0)
        choice = Choice(branching=1, width=1, levels=0, num_nodes=0, goodput=0.0)
        return Chosen(
            choice=choice,
            num_samples=1,
            view=view,
            chain_view=view,
            onward=acceptance.conditional,
            models_say=0.0,
            probe_s=_probe_s(view),
        )

    def drafts_by_profile(self, view: CostView, record: TrackRecord) -> bool:
        """True where a chain pays with the profile's acceptance, whatever this run has seen of it."""
        return self._shapes.best({1: view}, self._by_profile, record).num_nodes > 0

    def _evaluate(self, num_samples: int, width: int) -> BatchCosts:
        return BatchCosts(
            self._profile.cost,
            num_samples=num_samples,
            width=width,
            max_nodes=self._max_nodes,
            max_levels=self._max_depth,
        )


def _probe_s(view: CostView) -> float:
    levels, nodes = (min(PROBE_DEPTH, len(table) - 1) for table in (view.draft_s, view.uniform_s))
    return float(view.draft_s[levels] + view.uniform_s[nodes] - view.uniform_s[0])
