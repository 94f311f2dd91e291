"""How often the law is asked: plans stand and prices serve for a few steps, and nothing is lost by it."""

import numpy as np
import pytest
from hand_profile import (
    PaperDrafter,
    PaperRun,
    decode_state,
    draft_log,
    goodput,
    hand_cost,
    hand_profile,
)

from rlhfspec.core.decode_records import Budget, DraftLog, StepRecord
from rlhfspec.policies.drafting.cadence import (
    LARGE_BATCH_SEARCH_STEPS,
    SEARCH_STEPS,
    UPDATE_STEPS,
    Cadence,
    costed_batch,
)
from rlhfspec.policies.drafting.goodput import LARGE_BATCH, GoodputPolicy
from rlhfspec.profiles.cost import CostModel

CHEAP = hand_cost(forward_ms=10.0, token_ms=0.02, level_ms=0.5, draft_token_ms=0.01)
CONTEXT = hand_cost(forward_ms=10.0, token_ms=0.02, level_ms=0.5, context_token_ms=0.01)


def law_of(acceptance: float, cost: CostModel) -> GoodputPolicy:
    return GoodputPolicy(hand_profile(acceptance, cost), max_nodes=12, max_depth=12)


def cadence_of(acceptance: float, cost: CostModel) -> Cadence:
    return Cadence(law_of(acceptance, cost))


def step_record(step: int, batch: int, budget: Budget, draft: DraftLog | None) -> StepRecord:
    accepted = int(draft.num_accepted.sum()) if draft else 0
    return StepRecord(
        state=decode_state(step, batch),
        budget=budget,
        num_draft_tokens=int(draft.num_nodes.sum()) if draft else 0,
        num_accepted_tokens=accepted,
        num_accepted_rank2_plus=0,
        num_emitted_tokens=batch + accepted,
        draft_s=2e-3 if draft else 0.0,
        verify_s=1e-2,
        accept_s=2e-4,
        other_s=0.0,
        draft=draft,
    )


@pytest.mark.parametrize("batch", [1, 8, 24])
@pytest.mark.parametrize("truth", [0.0, 0.5, 0.85])
def test_goodput_with_cadence_is_near_that_of_the_law_asked_every_step(truth: float, batch: int) -> None:
    policies: list[GoodputPolicy | Cadence] = [law_of(0.8, CHEAP), cadence_of(0.8, CHEAP)]
    rates = []
    for policy in policies:
        run = PaperRun(
            policy=policy,
            cost=CHEAP,
            random=np.random.default_rng(0),
            drafter=PaperDrafter(truth=truth, shown=0.8),
        )
        rates.append(goodput(run.steps(400, batch)))
    # sampling error of 400 steps is about 3%
    assert rates[1] > 0.93 * rates[0]


@pytest.mark.parametrize("acceptance", [0.02, 0.9], ids=["plain", "draft"])
def test_a_large_batch_reuses_its_plan_between_updates(acceptance: float) -> None:
    policy = cadence_of(acceptance, CONTEXT)
    # the context grows so fast that every new plan is another one
    states = [decode_state(step, 24, context=100 + 500 * step) for step in range(2 * UPDATE_STEPS)]
    budgets = [policy.plan(state) for state in states]
    first, second = budgets[:UPDATE_STEPS], budgets[UPDATE_STEPS:]
    assert all(budget is first[0] for budget in first) and all(budget is second[0] for budget in second)
    assert first[0].is_plain == (acceptance < 0.5)
    assert first[0].is_plain or first[0] != second[0]


def test_a_small_batch_replans_at_every_step() -> None:
    policy = cadence_of(0.9, CONTEXT)
    budgets = [policy.plan(decode_state(step, 4, context=100 + 500 * step)) for step in range(UPDATE_STEPS)]
    assert len({budget.reason for budget in budgets}) == UPDATE_STEPS


def test_a_changed_batch_or_an_ending_response_replans_at_once() -> None:
    policy = cadence_of(0.9, CHEAP)
    budget = policy.plan(decode_state(8, 24))
    assert "B=24" in budget.reason and budget.depth > 2
    assert "B=23" in policy.plan(decode_state(9, 23)).reason
    assert policy.plan(decode_state(10, 23, remaining=budget.depth)).depth == budget.depth - 1


@pytest.mark.parametrize(("batch", "every"), [(4, 1), (LARGE_BATCH, UPDATE_STEPS)])
def test_a_large_batch_updates_its_estimators_every_fourth_step(batch: int, every: int) -> None:
    rejected = draft_log([[0.9]] * batch, [1] * batch, [0] * batch)

    def is_suspended_after(steps: list[int]) -> bool:
        policy = cadence_of(0.9, CHEAP)
        for step in steps:
            policy.observe(step_record(step, batch, policy.plan(decode_state(0, batch)), rejected))
        return "suspended" in policy.plan(decode_state(40, batch)).reason

    assert is_suspended_after([step for step in range(40) if step % UPDATE_STEPS == 0])
    assert is_suspended_after([step for step in range(40) if step % UPDATE_STEPS]) == (every == 1)


@pytest.mark.parametrize(
    ("batch", "served"), [(LARGE_BATCH - 1, SEARCH_STEPS), (LARGE_BATCH, LARGE_BATCH_SEARCH_STEPS)]
)
def test_between_searches_nodes_are_verified_by_the_last_price(batch: int, served: int) -> None:
    random = np.random.default_rng(0)
    policy = cadence_of(0.8, hand_cost(forward_ms=10.0, token_ms=0.15, level_ms=0.2))
    price, by_price = 0.0, []
    for step in range(2 * served):
        policy.plan(decode_state(step, batch))
        scores = np.cumprod(random.uniform(0.3, 0.99, (batch, 6)), axis=1)
        counts = policy.select(scores, (1,) * 6)
        if step % served == 0:
            assert 0 < counts.sum() < scores.size and counts.min() < counts.max()
            price = scores[counts > 0, counts[counts > 0] - 1].min()
        else:
            by_price.append(np.array_equal(counts, (scores >= price).sum(axis=1)))
    assert all(by_price)


@pytest.mark.parametrize(("acceptance", "batch", "least"), [(0.97, 1, 8), (0.97, 4, 4), (0.5, 1, 1)])
def test_levels_likely_to_be_drafted_are_not_asked_about(acceptance: float, batch: int, least: int) -> None:
    policy = cadence_of(acceptance, CHEAP)
    policy.plan(decode_state(0, batch))
    levels = policy.deepen(0, np.ones((batch, 1)))
    assert least <= levels and (acceptance > 0.9 or levels <= 2)
    # nobody would be accepted any further
    assert policy.deepen(levels, np.zeros((batch, 1))) == 0


def test_batches_of_nearly_one_size_share_their_costs() -> None:
    assert [costed_batch(batch) for batch in (1, 2, 3, 7, 8, 9, 10, 17)] == [1, 2, 3, 7, 8, 10, 10, 20]
    for batch in range(1, 300):
        assert batch <= costed_batch(batch) <= 1.25 * batch
        assert batch <= costed_batch(batch, 2) <= 1.5 * batch
    assert len({costed_batch(batch) for batch in range(33, 65)}) == 4
