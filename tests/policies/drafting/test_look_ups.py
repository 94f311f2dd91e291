"""Look-ups on paper: drafts that pay are verified, and a drafter that never helps costs next to nothing."""

import numpy as np
import pytest
from hand_profile import decode_state, draft_log, hand_cost, hand_profile

from rlhfspec.core.decode_records import StepRecord
from rlhfspec.policies.drafting.draft_policy import Proposal
from rlhfspec.policies.drafting.look_up_or_draft import AdaptiveDrafting
from rlhfspec.profiles.cost import CostModel, Shape

COST = hand_cost(forward_ms=10.0, token_ms=1.0)
"A node costs a tenth of a forward."
MS = 1e-3


def seconds(cost: CostModel, num_samples: int, num_nodes: np.ndarray) -> float:
    shape = Shape(
        num_samples=float(num_samples),
        context_tokens=100.0 * num_samples,
        num_nodes=float(num_nodes.sum()),
        widest=float(num_nodes.max(initial=0)),
        levels=1.0,
        width=1.0,
    )
    return float(cost.verify_s(shape) + cost.rest_s(shape))


class Run:
    """Decode steps of which a share finds something to copy, accepted node by node with a probability."""

    def __init__(self, *, found: float, shown: float, truth: float, look_up_ms: float = 0.1) -> None:
        self.policy = AdaptiveDrafting(
            hand_profile(0.5, COST), max_nodes=8, max_depth=8, computes=False, looks_up=True
        )
        self.found, self.shown, self.truth, self.look_up_s = found, shown, truth, look_up_ms * MS
        self.random = np.random.default_rng(0)
        self.records: list[StepRecord] = []

    def go(self, num_steps: int, batch: int = 4) -> "Run":
        for _ in range(num_steps):
            state = decode_state(len(self.records), batch)
            budget = self.policy.plan(state)
            counts = np.zeros(batch, dtype=int)
            draft, accepted = None, counts
            if not budget.is_plain and (has := self.random.random(batch) < self.found).any():
                scores = has[:, None] * self.shown ** np.arange(1.0, 9.0)
                (counts,) = self.policy.choose([Proposal(scores.astype(np.float32), (1,) * 8)])
                run = self.random.random((batch, 8)) < self.truth
                accepted = np.minimum(run.cumprod(axis=1).sum(axis=1), counts)
                draft = draft_log(scores, counts.tolist(), accepted.tolist())
            record = StepRecord(
                state=state,
                budget=budget,
                num_draft_tokens=int(counts.sum()),
                num_accepted_tokens=int(accepted.sum()),
                num_accepted_rank2_plus=0,
                num_emitted_tokens=batch + int(accepted.sum()),
                draft_s=0.0 if budget.is_plain else self.look_up_s,
                verify_s=seconds(COST, batch, counts),
                accept_s=0.0,
                other_s=0.0,
                draft=draft,
            )
            self.policy.observe(record)
            self.records.append(record)
        return self

    @property
    def over_plain(self) -> float:
        emitted = sum(record.num_emitted_tokens / record.num_samples for record in self.records)
        plain_s = seconds(COST, 4, np.zeros(4, dtype=int))
        return emitted * plain_s / sum(record.step_s for record in self.records)


def test_what_is_likely_is_verified_and_what_is_not_is_left_alone() -> None:
    run = Run(found=0.5, shown=0.95, truth=0.95)
    policy = run.policy
    policy.plan(decode_state(0, 3))
    scores = np.array([[0.9, 0.81, 0.7], [0.3, 0.05, 0.01], [0.0, 0.0, 0.0]], dtype=np.float32)
    likely, unlikely, nothing = policy.choose([Proposal(scores, (1, 1, 1))])[0].tolist()
    assert (likely, nothing) == (3, 0) and unlikely <= 1


def test_look_ups_that_are_accepted_pay() -> None:
    assert Run(found=0.5, shown=0.9, truth=0.9).go(400).over_plain > 1.2


@pytest.mark.parametrize(("found", "truth"), [(0.0, 0.0), (1.0, 0.0), (0.3, 0.05)])
def test_a_drafter_that_never_helps_costs_next_to_nothing(found: float, truth: float) -> None:
    run = Run(found=found, shown=0.6, truth=truth, look_up_ms=1.0).go(3000)
    assert run.over_plain > 0.985
    assert {record.budget.reason for record in run.records if record.budget.is_plain} >= {
        "look-ups do not pay: tried again in 2048 steps"
    }


def test_one_that_begins_to_help_is_noticed() -> None:
    run = Run(found=1.0, shown=0.8, truth=0.0).go(300)
    run.truth, run.records = 0.95, run.records
    before = len(run.records)
    run.go(2500)
    late = run.records[before + 2000 :]
    assert np.mean([not record.budget.is_plain for record in late]) > 0.9
