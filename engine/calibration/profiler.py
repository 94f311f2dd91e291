"""Measures a profile on a live engine: records drafts on real prompts, sweeps the costs of decode steps, fits.

The engine runs as it does in a rollout; only its policy is exchanged for one that draws plans. Fits are judged on
what they have not seen: acceptance on other prompts, costs on a later sweep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...core.decode_records import PLAIN, Budget, DecodeState, StepRecord
from ...core.records import SampleRequest
from ...policies.drafting.draft_policy import DraftLaw, Proposal
from ...profiles.acceptance import AcceptanceModel, fit_acceptance
from ...profiles.cost import CostTable, fit_costs, join_costs
from ...profiles.profile import Profile, YieldCurve
from ...profiles.provenance import Provenance
from ...profiles.quality import acceptance_quality, cost_quality
from ...profiles.recording import DraftRecording, join_nodes
from ..drafters.refinement import Scorer
from ..engine import Engine
from .cost_sweep import MAX_PROFILED_NODES, SHAPES, sweep_costs
from .draft_recorder import RecordingScorer

CURVE_NODES = 24
NOTHING_DRAFTED = (YieldCurve(branching=1, width=1, levels=1, curve=(0.0, 0.0)),)
"What look-ups yield is not known before a run: whoever plans with the profile alone goes by plain decoding."
PRIOR = AcceptanceModel(first=(1.0, 1.0, 0.0, 0.5, 0.0), other=(-1.0, -0.5, 0.5, 0.0, 0.0))
"Orders candidates before anything is fitted."
Progress = Callable[[str, float], None]
_SWEEPING = "profile: sweeping costs"


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeProfile:
    """A profile and the tables it was fitted on."""

    profile: Profile
    costs: CostTable
    drafts: list[DraftRecording]


def make_profile(
    engine: Engine,
    requests: Sequence[SampleRequest],
    provenance: Provenance,
    *,
    budget_s: float = 60.0,
    seed: int = 0,
    progress: Progress = lambda what, share: None,
) -> MadeProfile:
    """Measure and fit.

    Args:
        engine: built for MAX_PROFILED_NODES nodes, with nothing open.
        requests: real prompts with the run's sampling; their tokens are drafted and verified, not returned.
        provenance: what the profile belongs to.
        budget_s: about how long; a third for drafts, the rest for costs.
        seed: of the sweep's plans.
        progress: told what is done and the share.
    """
    policy, scorer = engine.policy, engine.scorer
    try:
        drafts = []
        for number, (branching, width, levels) in enumerate(SHAPES):
            progress("profile: recording drafts", number / len(SHAPES) / 3)
            share = 0.2 if number == 0 else 0.07
            drafts.append(
                record_drafts(engine, requests, branching, width, levels, budget_s=share * budget_s)
            )
        nodes = join_nodes([draft.nodes() for draft in drafts])
        acceptance = fit_acceptance(nodes)
        engine.scorer = Scorer(acceptance)
        sweeps = _two_sweeps(
            engine, requests, seed, 2 / 3 * budget_s, lambda share: progress(_SWEEPING, (1 + 2 * share) / 3)
        )
    finally:
        engine.cancel_all()
        engine.policy, engine.scorer = policy, scorer
    costs, recorded = join_costs(sweeps), engine.runner.recorded_samples
    quality = acceptance_quality(drafts) | cost_quality(fit_costs(sweeps[0], recorded), sweeps[1])
    profile = Profile(
        provenance=provenance,
        cost=fit_costs(costs, recorded),
        acceptance=acceptance,
        yields=yield_curves(drafts, acceptance),
        max_samples=engine.runner.pool.num_slots,
        quality=quality,
    )
    progress("profile: done", 1.0)
    return MadeProfile(profile=profile, costs=costs, drafts=drafts)


def make_verification_profile(
    engine: Engine,
    requests: Sequence[SampleRequest],
    provenance: Provenance,
    *,
    budget_s: float = 30.0,
    seed: int = 0,
    progress: Progress = lambda what, share: None,
) -> MadeProfile:
    """Measure what verification costs, for drafters that look tokens up: nothing is known of their acceptance.

    Arguments as `make_profile`; the engine's drafter is `engine.calibration.random_chains.RandomChains`.
    """
    policy, scorer = engine.policy, engine.scorer
    try:
        engine.scorer = Scorer(PRIOR)
        sweeps = _two_sweeps(
            engine, requests, seed, budget_s, lambda share: progress(_SWEEPING, share), chains_only=True
        )
    finally:
        engine.cancel_all()
        engine.policy, engine.scorer = policy, scorer
    costs, recorded = join_costs(sweeps), engine.runner.recorded_samples
    profile = Profile(
        provenance=provenance,
        cost=fit_costs(costs, recorded),
        acceptance=PRIOR,
        yields=NOTHING_DRAFTED,
        max_samples=engine.runner.pool.num_slots,
        quality=cost_quality(fit_costs(sweeps[0], recorded), sweeps[1]),
    )
    progress("profile: done", 1.0)
    return MadeProfile(profile=profile, costs=costs, drafts=[])


def _two_sweeps(
    engine: Engine,
    requests: Sequence[SampleRequest],
    seed: int,
    budget_s: float,
    progress: Callable[[float], None],
    *,
    chains_only: bool = False,
) -> list[CostTable]:
    """The costs, measured twice: the first fit is judged on the later sweep."""
    random = np.random.default_rng(seed)
    return [
        sweep_costs(
            engine,
            requests,
            random,
            budget_s=budget_s / 2,
            chains_only=chains_only,
            progress=lambda share, number=number: progress((number + share) / 2),
        )
        for number in range(2)
    ]


def yield_curves(drafts: Sequence[DraftRecording], acceptance: AcceptanceModel) -> tuple[YieldCurve, ...]:
    """The chain's curve at full depth: shorter chains are its heads; trees at every depth from two levels on."""
    curves = []
    for draft in drafts:
        deepest = int(draft.level.max())
        for levels in [deepest] if draft.branching == 1 else range(2, deepest + 1):
            curves.append(
                YieldCurve(
                    branching=draft.branching,
                    width=draft.width,
                    levels=levels,
                    curve=draft.yield_curve(acceptance, levels, CURVE_NODES),
                )
            )
    return tuple(curves)


def record_drafts(
    engine: Engine,
    requests: Sequence[SampleRequest],
    branching: int,
    width: int,
    levels: int,
    *,
    budget_s: float,
    model: AcceptanceModel = PRIOR,
) -> DraftRecording:
    """Generate with one shape, every candidate verified, until all is done or the time is over."""
    recorder = RecordingScorer(model, branching=branching, width=width, num_levels=levels)
    budget = Budget(
        num_nodes=MAX_PROFILED_NODES,
        depth=levels,
        branching=branching,
        width=width,
        reason="recording",
        refined=True,
    )
    engine.policy, engine.scorer = _Everything(budget), recorder
    for request in requests:
        engine.submit(request)
    deadline_s = time.perf_counter() + budget_s
    while engine.has_work and (time.perf_counter() < deadline_s or not recorder.num_drafts):
        engine.step()
    engine.cancel_all()
    return recorder.recording()


class Placeholder:
    """Stands for the policy while an engine is built to be profiled."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes

    def plan(self, state: DecodeState) -> Budget:
        """Decode plainly."""
        return PLAIN

    def observe(self, record: StepRecord) -> None:
        """Learn nothing."""


class _Everything(DraftLaw):
    """One shape, drafted whole and verified whole."""

    def __init__(self, budget: Budget) -> None:
        self.max_nodes = budget.num_nodes
        self._budget = budget

    def plan(self, state: DecodeState) -> Budget:
        depth = min(self._budget.depth, state.max_remaining_tokens - 1)
        return replace(self._budget, depth=depth) if depth > 0 else PLAIN

    def deepen(self, level: int, scores: np.ndarray) -> int:
        return self._budget.depth

    def choose(self, proposals: Sequence[Proposal]) -> list[np.ndarray]:
        return [np.full(len(one.scores), one.scores.shape[1], dtype=np.int64) for one in proposals]

    def observe(self, record: StepRecord) -> None:
        pass
