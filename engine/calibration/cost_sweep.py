"""Times decode steps with drawn plans: what drafting and verifying cost here (design 3.2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ...core.decode_records import PLAIN, Budget, DecodeState, StepRecord
from ...core.errors import ConfigError
from ...core.records import SampleKey, SampleRequest, Stream
from ...policies.drafting.draft_policy import DraftLaw, Proposal
from ...profiles.cost import CostTable, Shape
from ..engine import Engine

SHAPES = ((1, 1, 16), (2, 2, 8), (3, 3, 5))
"Branching, width, levels of the recorded drafts; the chain first."
MAX_PROFILED_NODES = 40
"Candidates of the largest recorded shape, all of them verified."
MOST_STARTS = 100
"Of a batch that is to be timed: each has one step at least, unless its samples end in the first."
REPEATS = 3
"Least decode steps of one drawn plan; a point of the sweep is the median of the later half."
POINT_S = 0.05
"""Least seconds of them together: machines are slow for ten or twenty milliseconds at a time, and a step shorter than
those before it takes a dozen to settle, because weights that are read more often stay in the processor's caches."""
SLOW_POINT_S = 0.5
"Seconds of them together after which fewer steps do."
CONTEXT_SHARES = (0.2, 0.6)
"Prompt lengths of the sweep, of the longest sample."
_PROMPTS = 2
"That samples of a batch have between them: a prompt is filled in once, and on a slow machine that takes seconds."
_CORNERS = 2
"Of the grid, that are timed in any case: the least and the most."


def sweep_costs(
    engine: Engine,
    requests: Sequence[SampleRequest],
    random: np.random.Generator,
    *,
    budget_s: float,
    chains_only: bool = False,
    progress: Callable[[float], None] = lambda share: None,
) -> CostTable:
    """Time decode steps with drawn plans, at batches of 1, 2, 4, .. and at short and long contexts.

    From the corners inwards: what the time no longer suffices for is left out, so a slow machine has a coarser grid.

    `chains_only`: for a drafter that knows no trees.
    """
    slots = engine.runner.pool.num_slots
    sizes = sorted({1 << power for power in range(slots.bit_length())} | {slots})
    room, longest = engine.exchange.kv_admission, engine.max_total_tokens
    cells = [
        (size, share)
        for size in sizes
        for share in CONTEXT_SHARES
        # those that do not run together cannot be timed together
        if size <= room.num_of(prompt_tokens_of(longest, share))
    ]
    last = len(cells) - 1
    cells = [cells[place] for place in sorted(range(len(cells)), key=lambda place: min(place, last - place))]
    rows: list[StepRecord] = []
    ends_s = time.perf_counter() + budget_s
    for number, (size, share) in enumerate(cells):
        if number >= _CORNERS and time.perf_counter() > ends_s:
            break
        progress(number / len(cells))
        plans = _DrawnPlans(random, chains_only=chains_only)
        rows += _cell(engine, _tiled(requests, size, share, engine), plans, budget_s / len(cells))
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


def _cell(
    engine: Engine, requests: list[SampleRequest], plans: _DrawnPlans, budget_s: float
) -> list[StepRecord]:
    """Time steps of one batch size from one context length on."""
    engine.policy = plans
    rows: list[StepRecord] = []
    deadline_s = time.perf_counter() + budget_s
    while time.perf_counter() < deadline_s or len(rows) < 4:
        plans.draw()
        group: list[StepRecord] = []
        starts, lasted_s = 0, 0.0
        while lasted_s < POINT_S or (len(group) < REPEATS and lasted_s < SLOW_POINT_S):
            if engine.num_running < len(requests):
                starts += 1
                if starts > MOST_STARTS:
                    raise ConfigError(
                        f"a profile needs decode steps to time and got {len(group)} in {MOST_STARTS} starts: samples "
                        f"of {engine.max_total_tokens} tokens are too short; set speculation.policy to bandit or off"
                    )
                engine.cancel_all()
                for request in requests:
                    engine.submit(request)
                # the first draft fills the draft cache: not a step like the others
                plans.warm_up = True
                engine.step()
                plans.warm_up = False
            else:
                ended = engine.step()
                # a step that ends samples does more; where every one does, it has to serve
                if not ended or starts > REPEATS:
                    group.append(engine.step_records[-1])
                    lasted_s += group[-1].step_s
        rows.append(_typical(group[min(len(group) // 2, len(group) - REPEATS) :]))
        if rows[-1].step_s > SLOW_POINT_S:
            # no law comes near: time is for what it may choose
            plans.most = max(1, plans.most // 2)
    engine.cancel_all()
    return rows


def prompt_tokens_of(longest: int, share: float) -> int:
    """Prompt tokens of the sweep's samples."""
    return max(4, int(longest * share))


def _tiled(
    requests: Sequence[SampleRequest], count: int, share: float, engine: Engine
) -> list[SampleRequest]:
    """`count` requests whose prompts are tiled to a share of the longest sample, and that never stop early."""
    longest = engine.max_total_tokens
    length = prompt_tokens_of(longest, share)
    tiled = []
    for index in range(count):
        request = requests[index % min(len(requests), _PROMPTS)]
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


class _DrawnPlans(DraftLaw):
    """Plain, then one node for every sample, between which a law decides most; then shapes, depths and numbers of nodes
    drawn at random, a fifth plain, a third ragged.
    """

    max_nodes = MAX_PROFILED_NODES
    _DEPTHS = ((1, 2, 3, 4, 6, 8, 12, 16), (2, 3, 4, 6), (2, 3, 4))
    _SHARES = (0.2, 0.6, 0.12, 0.08)

    def __init__(self, random: np.random.Generator, *, chains_only: bool = False) -> None:
        self.warm_up = False
        self.most = 16
        "nodes of a sample"
        self._number = 0
        self._shares = (0.25, 0.75) if chains_only else self._SHARES
        self._random = random
        self._budget = PLAIN
        self._counts: np.ndarray | None = None

    def draw(self) -> None:
        """Draw the next plan."""
        self._counts, self._number = None, self._number + 1
        if self._number <= 2:
            self._budget = PLAIN if self._number == 1 else _sweep_budget(1, 1, 1)
            return
        kind = int(self._random.choice(len(self._shares), p=self._shares))
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

    def choose(self, proposals: Sequence[Proposal]) -> list[np.ndarray]:
        return [self._count(one.scores, one.level_sizes) for one in proposals]

    def _count(self, scores: np.ndarray, level_sizes: tuple[int, ...]) -> np.ndarray:
        batch, most = len(scores), min(scores.shape[1], self.most)
        if self.warm_up:
            return np.ones(batch, dtype=np.int64)
        if self._counts is None:
            if self._number > 2 and batch > 1 and self._random.random() < 0.35:
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
