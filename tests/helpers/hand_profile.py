"""Hand-made profiles, draft logs and decode steps, and a drafter on paper: the food of policies without a model."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from rlhfspec.core.decode_records import Budget, DecodeState, DraftLog, StepRecord
from rlhfspec.policies.drafting.cadence import Cadence
from rlhfspec.policies.drafting.draft_policy import DraftLaw, Proposal
from rlhfspec.policies.drafting.goodput import GoodputPolicy
from rlhfspec.policies.drafting.look_up_or_draft import AdaptiveDrafting
from rlhfspec.profiles.acceptance import AcceptanceModel
from rlhfspec.profiles.cost import BATCH_HINGES, DRAFT_HINGES, VERIFY_HINGES, CostModel, Shape
from rlhfspec.profiles.profile import Profile, YieldCurve
from rlhfspec.profiles.provenance import Provenance

CHAIN_NODES = 16
MS = 1e-3


def hand_provenance(**changes: Any) -> Provenance:
    """Every field says its own name, numbers are 1."""
    values: dict[str, Any] = {
        f.name: 1 if f.type in (int, "int") else f"the {f.name}" for f in fields(Provenance)
    }
    return Provenance(**values | changes)


def hand_cost(
    *,
    forward_ms: float = 10.0,
    token_ms: float = 0.0,
    knee_tokens: int = 16,
    knee_ms: float = 0.0,
    context_token_ms: float = 0.0,
    scatter_ms: float = 0.0,
    level_ms: float = 1.0,
    draft_token_ms: float = 0.0,
) -> CostModel:
    """Costs with few terms: a target forward, tokens before and behind one knee, levels of the draft."""
    hinges = len(VERIFY_HINGES) + len(BATCH_HINGES)
    verify = np.zeros(9 + hinges)
    verify[[0, 2, 3 + VERIFY_HINGES.index(knee_tokens), 3 + hinges, 6 + hinges]] = (
        forward_ms,
        token_ms,
        knee_ms,
        context_token_ms,
        scatter_ms,
    )
    draft = np.zeros(6 + len(DRAFT_HINGES) + 3)
    draft[[4, 5]] = level_ms, draft_token_ms
    rest = np.array([0.2, 0.0, 0.0, 0.0, 0.0, 0.0])
    return CostModel(
        draft=tuple(draft * MS), verify=tuple((verify * MS).tolist()), rest=tuple((rest * MS).tolist())
    )


def chain_curve(acceptance: float, nodes: int = CHAIN_NODES) -> tuple[float, ...]:
    """Accepted nodes of chains whose every child is accepted with one probability."""
    return (0.0, *np.cumsum(acceptance ** np.arange(1, nodes + 1)).tolist())


def hand_profile(
    acceptance: float, cost: CostModel, *, trees: tuple[YieldCurve, ...] = (), max_samples: int = 64
) -> Profile:
    logit = float(np.log(acceptance / (1 - acceptance))) if 0 < acceptance < 1 else -5.0
    chain = YieldCurve(branching=1, width=1, levels=CHAIN_NODES, curve=chain_curve(acceptance))
    return Profile(
        provenance=hand_provenance(),
        cost=cost,
        acceptance=AcceptanceModel(first=(logit, 0, 0, 0, 0), other=(-2.0, 0, 0, 0, 0)),
        yields=(chain, *trees),
        max_samples=max_samples,
    )


def draft_log(
    scores: list[list[float]] | np.ndarray,
    num_nodes: list[int],
    num_accepted: list[int],
    level_sizes: tuple[int, ...] | None = None,
) -> DraftLog:
    """A log; chains by default."""
    table = np.asarray(scores, dtype=np.float32)
    return DraftLog(
        scores=table,
        level_sizes=level_sizes or (1,) * table.shape[1],
        num_nodes=np.asarray(num_nodes),
        num_accepted=np.asarray(num_accepted),
    )


def first_nodes(accepted: np.ndarray, score: float = 0.9) -> DraftLog:
    """One verified node for each sample."""
    rows = len(accepted)
    return draft_log(np.full((rows, 1), score), [1] * rows, accepted.astype(int).tolist())


def decode_state(
    step: int = 0,
    num_samples: int = 1,
    *,
    context: int = 100,
    remaining: int = 1000,
    weight_version: int = 0,
    drafter_version: int = 0,
) -> DecodeState:
    return DecodeState(
        decode_step=step,
        num_samples=num_samples,
        context_tokens=context * num_samples,
        max_remaining_tokens=remaining,
        weight_version=weight_version,
        drafter_version=drafter_version,
    )


PaperPolicy = AdaptiveDrafting | GoodputPolicy | Cadence


@dataclass(kw_only=True)
class PaperDrafter:
    """Drafts and verifies on paper, and takes the time that the costs say.

    The first choice is accepted with probability `truth`, any other with `truth_others` where those before were not;
    the policy is shown `shown` and `shown_others`.
    """

    truth: float
    shown: float
    truth_others: float = 0.0
    shown_others: float = 0.05

    def draft(self, policy: PaperPolicy, budget: Budget, batch: int, random: np.random.Generator) -> DraftLog:
        sizes: list[int] = []
        scores: list[np.ndarray] = []
        paths: list[np.ndarray] = []
        frontier, alive = np.ones((batch, 1), dtype=np.float32), np.ones((batch, 1), dtype=bool)
        shown = np.array([self.shown] + [self.shown_others] * (budget.branching - 1), dtype=np.float32)
        asked_at = 0
        last = frontier
        for level in range(budget.depth):
            if level == asked_at:
                asked_at += policy.deepen(level, last)
                if level == asked_at:
                    break
            last = (frontier[..., None] * shown).reshape(batch, -1)
            right = np.zeros((*alive.shape, budget.branching), dtype=bool)
            for rank in range(budget.branching):
                chance = self.truth if rank == 0 else self.truth_others
                hit = (random.random(alive.shape) < chance) & ~right.any(-1)
                right[..., rank] = hit
            lives = (right & alive[..., None]).reshape(batch, -1)
            sizes.append(last.shape[1])
            scores.append(last)
            paths.append(lives)
            best = np.argsort(-last, axis=1, kind="stable")[:, : budget.width]
            frontier, alive = np.take_along_axis(last, best, 1), np.take_along_axis(lives, best, 1)
        table, lives = np.concatenate(scores, axis=1), np.concatenate(paths, axis=1)
        offered = Proposal(table, tuple(sizes))
        counts = policy.choose([offered])[0] if isinstance(policy, DraftLaw) else policy.select(*offered[:2])
        order = np.argsort(-table, axis=1, kind="stable")
        chosen = np.take_along_axis(lives, order, 1) & (np.arange(table.shape[1]) < counts[:, None])
        return draft_log(table, counts.tolist(), chosen.sum(1).tolist(), tuple(sizes))


@dataclass(kw_only=True)
class PaperRun:
    """A run of decode steps on paper; time passes as `cost` says, catching up with missing tokens included."""

    policy: PaperPolicy
    cost: CostModel
    random: np.random.Generator
    drafter: PaperDrafter
    step: int = 0
    missing: int = 0
    weight_version: int = 0
    drafter_version: int = 0

    def steps(self, count: int, batch: int, *, context: int = 100, remaining: int = 1000) -> list[StepRecord]:
        return [self._one(batch, context, remaining) for _ in range(count)]

    def _one(self, batch: int, context: int, remaining: int) -> StepRecord:
        state = decode_state(
            self.step,
            batch,
            context=context,
            remaining=remaining,
            weight_version=self.weight_version,
            drafter_version=self.drafter_version,
        )
        budget = self.policy.plan(state)
        draft = None if budget.is_plain else self.drafter.draft(self.policy, budget, batch, self.random)
        shape = Shape(
            num_samples=float(batch),
            context_tokens=float(state.context_tokens),
            num_nodes=float(draft.num_nodes.sum()) if draft else 0.0,
            widest=float(draft.num_nodes.max()) if draft else 0.0,
            levels=float(len(draft.level_sizes)) if draft else 0.0,
            width=float(budget.width or 1),
        )
        accepted = int(draft.num_accepted.sum()) if draft else 0
        draft_s = float(self.cost.draft_s(shape))
        if draft is None:
            self.missing += batch
        else:
            # a draft cache lacks no more tokens than there are
            draft_s += min(self.missing, state.context_tokens) * float(sum(self.cost.draft[5:10]))
            self.missing = 0
        record = StepRecord(
            state=state,
            budget=budget,
            num_draft_tokens=int(draft.num_nodes.sum()) if draft else 0,
            num_accepted_tokens=accepted,
            num_accepted_rank2_plus=0,
            num_emitted_tokens=batch + accepted,
            draft_s=draft_s,
            verify_s=float(self.cost.verify_s(shape)),
            accept_s=float(self.cost.rest_s(shape)),
            other_s=0.0,
            draft=draft,
        )
        self.policy.observe(record)
        self.step += 1
        return record


def total_s(records: list[StepRecord]) -> float:
    return sum(record.step_s for record in records)


def goodput(records: list[StepRecord]) -> float:
    return sum(record.num_emitted_tokens for record in records) / total_s(records)
