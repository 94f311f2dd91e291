"""Recorded drafts as a world without a clock: batches are drawn, outcomes are exact, seconds are predicted.

Both the oracle and the policy are judged here, on the same states and the same costs, so that their ratio holds
no noise of the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.decode_records import Budget, DecodeState, DraftLog, StepRecord
from ...policies.drafting.draft_policy import Proposal
from ...policies.drafting.look_up_or_draft import AdaptiveDrafting
from ...profiles.acceptance import AcceptanceModel
from ...profiles.cost import CostModel, Shape
from ...profiles.recording import DraftRecording

CONTEXT_TOKENS = 96
"Mean context of a sample in the simulated batches."


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One batch's draft: candidates level by level, [B, C]."""

    scores: np.ndarray
    accepted: np.ndarray
    level: np.ndarray
    "[C]"

    def head(self, levels: int) -> Draft:
        """The first levels."""
        kept = self.level <= levels
        return Draft(scores=self.scores[:, kept], accepted=self.accepted[:, kept], level=self.level[kept])

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Candidates of each level."""
        return tuple(np.bincount(self.level)[1:].tolist())

    def num_accepted(self, num_nodes: np.ndarray) -> np.ndarray:
        """Accepted among each sample's best `num_nodes[b]`, [B]."""
        order = np.argsort(-self.scores, axis=1, kind="stable")
        chosen = np.arange(self.scores.shape[1]) < num_nodes[:, None]
        return (np.take_along_axis(self.accepted, order, axis=1) & chosen).sum(axis=1)


class World:
    """Draws batches of recorded drafts of every shape."""

    def __init__(
        self, drafts: list[DraftRecording], model: AcceptanceModel, cost: CostModel, *, seed: int
    ) -> None:
        self.cost = cost
        self._drafts = {draft.width: draft for draft in drafts}
        self._scores = {draft.width: draft.scores(model).astype(np.float32) for draft in drafts}
        self._random = np.random.default_rng(seed)

    def draw(self, width: int, batch: int) -> Draft:
        """Return one batch's draft of the deepest recorded levels."""
        draft = self._drafts[width]
        rows = self._random.integers(len(draft), size=batch)
        return Draft(scores=self._scores[width][rows], accepted=draft.accepted[rows], level=draft.level)

    def seconds(
        self, batch: int, num_nodes: np.ndarray, levels: int, width: int
    ) -> tuple[float, float, float]:
        """Predicted seconds to draft, to verify, and the rest."""
        shape = Shape(
            num_samples=float(batch),
            context_tokens=float(batch * CONTEXT_TOKENS),
            num_nodes=float(num_nodes.sum()),
            widest=float(num_nodes.max()),
            levels=float(levels),
            width=float(max(width, 1)),
        )
        cost = self.cost
        return float(cost.draft_s(shape)), float(cost.verify_s(shape)), float(cost.rest_s(shape))


def policy_goodput(policy: AdaptiveDrafting, world: World, batch: int, steps: int, select_s: float) -> float:
    """Tokens per predicted second of a policy over `steps` decode steps; its first quarter is warm-up."""
    tokens = seconds = 0.0
    for number in range(steps):
        record = _step(policy, world, batch, number, select_s)
        if number >= steps // 4:
            tokens += record.num_emitted_tokens
            seconds += record.step_s
    return tokens / seconds


def _step(policy: AdaptiveDrafting, world: World, batch: int, number: int, select_s: float) -> StepRecord:
    state = DecodeState(
        decode_step=number,
        num_samples=batch,
        context_tokens=batch * CONTEXT_TOKENS,
        max_remaining_tokens=1000,
    )
    budget = policy.plan(state)
    log, levels, counts = None, 0, np.zeros(batch, dtype=np.int64)
    if not budget.is_plain:
        log, levels = _draft(policy, world, batch, budget)
        counts = log.num_nodes if log is not None else counts
    draft_s, verify_s, rest_s = world.seconds(batch, counts, levels, budget.width)
    accepted = int(log.num_accepted.sum()) if log is not None else 0
    record = StepRecord(
        state=state,
        budget=budget,
        num_draft_tokens=int(counts.sum()),
        num_accepted_tokens=accepted,
        num_accepted_rank2_plus=0,
        num_emitted_tokens=batch + accepted,
        draft_s=draft_s,
        verify_s=verify_s,
        accept_s=rest_s,
        other_s=select_s,
        select_s=select_s,
        draft=log,
    )
    policy.observe(record)
    return record


def _draft(policy: AdaptiveDrafting, world: World, batch: int, budget: Budget) -> tuple[DraftLog | None, int]:
    """Let the policy refine a drawn draft as the drafter would."""
    whole = world.draw(budget.width, batch)
    deepest = min(budget.depth, int(whole.level.max()))
    asked_at = min(deepest, policy.deepen(0, np.ones((batch, 1), dtype=np.float32)))
    if asked_at == 0:
        return None, 0
    while asked_at < deepest:
        more = policy.deepen(asked_at, whole.scores[:, whole.level == asked_at])
        if more == 0:
            break
        asked_at = min(deepest, asked_at + more)
    draft = whole.head(asked_at)
    (counts,) = policy.choose([Proposal(draft.scores, draft.level_sizes)])
    log = DraftLog(
        scores=draft.scores,
        level_sizes=draft.level_sizes,
        num_nodes=counts,
        num_accepted=draft.num_accepted(counts),
    )
    return log, asked_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One point of the oracle's grid: a shape drafted to `levels`, the best `num_nodes` verified for every sample."""

    width: int
    levels: int
    num_nodes: int


GRID = (
    Plan(width=1, levels=0, num_nodes=0),
    *(Plan(width=1, levels=n, num_nodes=n) for n in range(1, 17)),
    *(Plan(width=2, levels=d, num_nodes=n) for d in (2, 3, 4, 6, 8) for n in (3, 4, 6, 8, 12, 16) if n > d),
    *(Plan(width=3, levels=d, num_nodes=n) for d in (2, 3, 4, 5) for n in (4, 6, 8, 12, 16) if n > d),
)
STATES = 3
"Drafter states: terciles of the batch's mean first score."


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleGoodput:
    """Tokens per second of the best plans."""

    by_state: float
    "best plan of each drafter state, chosen on one half of the batches and scored on the other"
    realised: float
    "best plan of every single batch in hindsight"


def oracle_goodput(world: World, batch: int, num_batches: int) -> OracleGoodput:
    """Try the whole grid on drawn batches."""
    tokens = np.zeros((len(GRID), num_batches))
    state = np.zeros((len(GRID), num_batches))
    seconds = np.array(
        [sum(world.seconds(batch, np.full(batch, plan.num_nodes), plan.levels, plan.width)) for plan in GRID]
    )
    for width in (1, 2, 3):
        plans = [number for number, plan in enumerate(GRID) if plan.width == width]
        for column in range(num_batches):
            draft = world.draw(width, batch)
            first = draft.scores[:, draft.level == 1].max(axis=1).mean()
            for number in plans:
                plan = GRID[number]
                state[number, column] = first
                tokens[number, column] = batch
                if plan.num_nodes:
                    counts = np.full(batch, plan.num_nodes)
                    tokens[number, column] += draft.head(plan.levels).num_accepted(counts).sum()
    edges = np.quantile(state[0], np.arange(1, STATES) / STATES)
    bins = np.stack([np.searchsorted(edges, row) for row in state])
    half = np.arange(num_batches) % 2 == 0
    gained = spent = 0.0
    for number in range(STATES):
        # a rate of exchange found on the first half decides, so that slow and fast states trade fairly
        chosen = _best(tokens, seconds, (bins == number) & half)
        scored = tokens[chosen][(bins[chosen] == number) & ~half]
        gained += scored.sum()
        spent += len(scored) * seconds[chosen]
    by_state = gained / spent
    chain = [number for number, plan in enumerate(GRID) if plan.width == 1]
    rate = by_state
    for _ in range(20):
        best = (tokens[chain] - rate * seconds[chain, None]).argmax(axis=0)
        picked = np.asarray(chain)[best]
        rate = tokens[picked, np.arange(num_batches)].sum() / seconds[picked].sum()
    return OracleGoodput(by_state=float(by_state), realised=float(rate))


def _best(tokens: np.ndarray, seconds: np.ndarray, where: np.ndarray) -> int:
    """Best mean tokens over mean time among the grid's plans, on the batches marked [plans, batches]."""
    mean = (tokens * where).sum(axis=1) / np.maximum(where.sum(axis=1), 1)
    return int((mean / seconds).argmax())
