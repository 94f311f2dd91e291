"""The planner: what every shape of draft costs for this batch and context, and which one has the highest goodput.

It keeps no state but tables of costs; what it answers, `Chosen`, is what the law goes by until the next plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rlhfspec.policies.drafting.cost_view import BatchCosts, CostView
from rlhfspec.policies.drafting.recalibration import AcceptanceRecalibration, CostRecalibration
from rlhfspec.policies.drafting.shapes import Choice, ShapeTable
from rlhfspec.policies.drafting.track_record import TrackRecord
from rlhfspec.profiles.profile import Profile

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
    "costs of the choice"
    chain_view: CostView
    onward: np.ndarray
    "acceptance of a level given the one before, [levels]"
    models_say: float
    "tokens per second of the choice before its track record"
    probe_s: float
    "what a probe costs beyond plain decoding, but for the tokens that the draft cache lacks"


class Planner:
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
        views = {
            width: self._costs_of(num_samples, width).at(
                context_tokens, draft=costs.draft, verify=costs.verify
            )
            for width in widths
        }
        onward = acceptance.conditional
        choice = self._shapes.best(views, np.cumprod(onward), record)
        return Chosen(
            choice=choice,
            num_samples=num_samples,
            view=views[choice.width],
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
