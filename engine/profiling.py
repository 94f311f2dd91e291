"""Measures a profile on a live engine: records drafts on real prompts, sweeps the costs of decode steps, fits.

The engine runs as it does in a rollout; only its policy is exchanged for one that draws plans. Fits are judged on
what they have not seen: acceptance on other prompts, costs on a later sweep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from core.records import PLAIN, Budget, DecodeState, SampleKey, SampleRequest, StepRecord, Stream
from engine.generator import Engine
from engine.recording import RecordingScorer
from engine.refinement import Scorer
from profiles.acceptance import AcceptanceModel, fit_acceptance
from profiles.cost import CostTable, Shape, fit_costs
from profiles.profile import Profile, YieldCurve
from profiles.provenance import Provenance
from profiles.quality import acceptance_quality, cost_quality
from profiles.recording import DraftRecording, join_nodes

SHAPES = ((1, 1, 16), (2, 2, 8), (3, 3, 5))
"Branching, width, levels of the recorded drafts; the chain first."
MAX_PROFILED_NODES = 40
"Candidates of the largest recorded shape, all of them verified."
CURVE_NODES = 24
PRIOR = AcceptanceModel(first=(1.0, 1.0, 0.0, 0.5, 0.0), other=(-1.0, -0.5, 0.5, 0.0, 0.0))
"Orders candidates before anything is fitted."
REPEATS = 3
"Decode steps of one drawn plan; a point of the sweep is their median."
CONTEXT_SHARES = (0.2, 0.6)
"Prompt lengths of the sweep, of the longest sample."

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeProfile:
    """A profile and the tables it was fitted on."""

    profile: Profile
    costs: CostTable
    held_out_costs: CostTable
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
        random = np.random.default_rng(seed)
        sweeps = []
        for number in range(2):

            def report(share: float, number: int = number) -> None:
                progress("profile: sweeping costs", (1 + number + share) / 3)

            sweeps.append(sweep_costs(engine, requests, random, budget_s=budget_s / 3, progress=report))
    finally:
        engine.cancel_all()
        engine.policy, engine.scorer = policy, scorer
    quality = acceptance_quality(drafts) | cost_quality(fit_costs(sweeps[0]), sweeps[1])
    profile = Profile(
        provenance=provenance,
        cost=fit_costs(join_costs(sweeps)),
        acceptance=acceptance,
        yields=yield_curves(drafts, acceptance),
        max_samples=engine.runner.pool.num_slots,
        quality=quality,
    )
    progress("profile: done", 1.0)
    return MadeProfile(profile=profile, costs=join_costs(sweeps), held_out_costs=sweeps[1], drafts=drafts)


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


def sweep_costs(
    engine: Engine,
    requests: Sequence[SampleRequest],
    random: np.random.Generator,
    *,
    budget_s: float,
    progress: Callable[[float], None] = lambda share: None,
) -> CostTable:
    """Time decode steps with drawn plans, at batches of 1, 2, 4, .. and at short and long contexts."""
    slots = engine.runner.pool.num_slots
    sizes = sorted({1 << power for power in range(slots.bit_length())} | {slots})
    cells = [(size, share) for size in sizes for share in CONTEXT_SHARES]
    rows: list[StepRecord] = []
    for number, (size, share) in enumerate(cells):
        progress(number / len(cells))
        rows += _cell(engine, _tiled(requests, size, share, engine), random, budget_s / len(cells))
    return cost_table(rows)


def cost_table(records: Sequence[StepRecord]) -> CostTable:
    """Take the phases of decode steps with what was drafted and verified."""

    def column(value: Callable[[StepRecord], float]) -> np.ndarray:
        return np.array([value(record) for record in records], dtype=float)

    return CostTable(
        shape=Shape(
            num_samples=column(lambda r: r.num_samples),
            context_tokens=column(lambda r: r.context_tokens),
            num_nodes=column(lambda r: r.draft.num_nodes.sum() if r.draft else 0),
            widest=column(lambda r: r.draft.num_nodes.max() if r.draft else 0),
            levels=column(lambda r: len(r.draft.level_sizes) if r.draft else 0),
            width=column(lambda r: r.budget.width or 1),
        ),
        draft_s=column(lambda r: r.draft_s),
        verify_s=column(lambda r: r.verify_s),
        rest_s=column(lambda r: r.accept_s + r.other_s),
    )


def join_costs(tables: Sequence[CostTable]) -> CostTable:
    """Put tables behind one another."""

    def joined(get: Callable[[CostTable], np.ndarray | float]) -> np.ndarray:
        return np.concatenate([np.asarray(get(table)) for table in tables])

    names = Shape.__dataclass_fields__
    return CostTable(
        shape=Shape(**{name: joined(lambda t, name=name: getattr(t.shape, name)) for name in names}),
        draft_s=joined(lambda t: t.draft_s),
        verify_s=joined(lambda t: t.verify_s),
        rest_s=joined(lambda t: t.rest_s),
    )


def _cell(
    engine: Engine, requests: list[SampleRequest], random: np.random.Generator, budget_s: float
) -> list[StepRecord]:
    """Time steps of one batch size from one context length on."""
    plans = _DrawnPlans(random)
    engine.policy = plans
    rows: list[StepRecord] = []
    deadline_s = time.perf_counter() + budget_s
    while time.perf_counter() < deadline_s or len(rows) < 4:
        plans.draw()
        group: list[StepRecord] = []
        while len(group) < REPEATS:
            if engine.num_running < len(requests):
                engine.cancel_all()
                for request in requests:
                    engine.submit(request)
                # the first draft fills the draft cache: not a step like the others
                plans.warm_up = True
                engine.step()
                plans.warm_up = False
            elif not engine.step():
                group.append(engine.step_records[-1])
        rows.append(_typical(group))
    engine.cancel_all()
    return rows


def _tiled(
    requests: Sequence[SampleRequest], count: int, share: float, engine: Engine
) -> list[SampleRequest]:
    """`count` requests whose prompts are tiled to a share of the longest sample, and that never stop early."""
    longest = engine.max_total_tokens
    length = max(4, int(longest * share))
    tiled = []
    for index in range(count):
        request = requests[index % len(requests)]
        tokens = np.resize(request.prompt.token_ids, length)
        tiled.append(
            replace(
                request,
                key=SampleKey(run_seed=0, stream=Stream.BENCH, sample_index=index),
                prompt=replace(request.prompt, token_ids=tokens),
                sampling=replace(request.sampling, stop_token_ids=(), max_new_tokens=longest - length),
            )
        )
    return tiled


class Placeholder:
    """Stands for the policy while an engine is built to be profiled."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes

    def plan(self, state: DecodeState) -> Budget:
        """Decode plainly."""
        return PLAIN

    def observe(self, record: StepRecord) -> None:
        """Learn nothing."""


class _Everything:
    """One shape, drafted whole and verified whole."""

    def __init__(self, budget: Budget) -> None:
        self.max_nodes = budget.num_nodes
        self._budget = budget

    def plan(self, state: DecodeState) -> Budget:
        depth = min(self._budget.depth, state.max_remaining_tokens - 1)
        return replace(self._budget, depth=depth) if depth > 0 else PLAIN

    def deepen(self, level: int, scores: np.ndarray) -> int:
        return self._budget.depth

    def select(self, scores: np.ndarray, level_sizes: tuple[int, ...]) -> np.ndarray:
        return np.full(len(scores), scores.shape[1], dtype=np.int64)

    def observe(self, record: StepRecord) -> None:
        pass


class _DrawnPlans:
    """Shapes, depths and numbers of nodes drawn at random; a fifth plain, a third ragged."""

    max_nodes = MAX_PROFILED_NODES
    _DEPTHS = ((1, 2, 3, 4, 6, 8, 12, 16), (2, 3, 4, 6), (2, 3, 4))
    _SHARES = (0.2, 0.6, 0.12, 0.08)
    _MOST = 16

    def __init__(self, random: np.random.Generator) -> None:
        self.warm_up = False
        self._random = random
        self._budget = PLAIN
        self._counts: np.ndarray | None = None

    def draw(self) -> None:
        """Draw the next plan."""
        self._counts = None
        kind = int(self._random.choice(4, p=self._SHARES))
        if kind == 0:
            self._budget = PLAIN
            return
        branching, width, _ = SHAPES[kind - 1]
        depth = int(self._random.choice(self._DEPTHS[kind - 1]))
        self._budget = _sweep_budget(depth, branching, width)

    def plan(self, state: DecodeState) -> Budget:
        budget = _sweep_budget(1, 1, 1) if self.warm_up else self._budget
        depth = min(budget.depth, state.max_remaining_tokens - 1)
        return replace(budget, depth=depth) if depth > 0 else PLAIN

    def deepen(self, level: int, scores: np.ndarray) -> int:
        return 1

    def select(self, scores: np.ndarray, level_sizes: tuple[int, ...]) -> np.ndarray:
        batch, most = len(scores), min(scores.shape[1], self._MOST)
        if self.warm_up:
            return np.ones(batch, dtype=np.int64)
        if self._counts is None:
            if batch > 1 and self._random.random() < 0.35:
                self._counts = self._random.integers(0, most + 1, size=batch)
            else:
                least = most if len(level_sizes) == scores.shape[1] else max(1, most // 3)
                self._counts = np.full(batch, self._random.integers(least, most + 1), dtype=np.int64)
        return np.minimum(self._counts, most)

    def observe(self, record: StepRecord) -> None:
        pass


def _sweep_budget(depth: int, branching: int, width: int) -> Budget:
    return Budget(
        num_nodes=MAX_PROFILED_NODES,
        depth=depth,
        branching=branching,
        width=width,
        reason="sweep",
        refined=True,
    )


def _typical(records: Sequence[StepRecord]) -> StepRecord:
    """One record of a plan run a few times: the median of each phase."""

    def median(name: str) -> float:
        return float(np.median([getattr(record, name) for record in records]))

    return replace(
        records[len(records) // 2],
        **{name: median(name) for name in ("draft_s", "verify_s", "accept_s", "other_s")},
    )
