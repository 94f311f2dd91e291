"""What a run teaches its estimators, and when the past counts less: other weights, another batch, a drafter revived."""

from copy import deepcopy

import numpy as np
import pytest
from hand_profile import decode_state, draft_log, first_nodes, hand_cost, hand_profile

from rlhfspec.core.decode_records import PLAIN, Budget, DecodeState, DraftLog, StepRecord
from rlhfspec.policies.drafting.estimators import OTHER_BATCH, Estimators
from rlhfspec.policies.drafting.shape_search import Chosen, ShapeSearch

COST = hand_cost(forward_ms=10.0, token_ms=0.1, level_ms=0.5)
CHAIN = Budget(num_nodes=4, depth=4, branching=1, width=1, reason="by hand", refined=True)


def make_estimators() -> Estimators:
    return Estimators(hand_profile(0.8, COST), 8)


def record_of(
    state: DecodeState, draft: DraftLog | None, *, budget: Budget | None = None, slower: float = 1.0
) -> StepRecord:
    accepted = int(draft.num_accepted.sum()) if draft else 0
    return StepRecord(
        state=state,
        budget=budget or (CHAIN if draft else PLAIN),
        num_draft_tokens=int(draft.num_nodes.sum()) if draft else 0,
        num_accepted_tokens=accepted,
        num_accepted_rank2_plus=0,
        num_emitted_tokens=state.num_samples + accepted,
        draft_s=2e-3 * slower,
        verify_s=1e-2 * slower,
        accept_s=2e-4,
        other_s=0.0,
        draft=draft,
    )


def half_accepted(batch: int) -> DraftLog:
    """Scored 0.8; half fail at the first node, half at the second."""
    accepted = [1] * (batch // 2) + [0] * (batch - batch // 2)
    return draft_log(0.8 ** np.arange(1, 5) * np.ones((batch, 1)), [4] * batch, accepted)


def taught(batch: int = 4, steps: int = 60) -> Estimators:
    """Estimators that know of more rejections than the scores expect."""
    estimators = make_estimators()
    for step in range(steps):
        estimators.observe_draft(record_of(decode_state(step, batch), half_accepted(batch)))
    assert estimators.acceptance.hazard_ratio > 1.5
    return estimators


@pytest.mark.parametrize("which", ["weight_version", "drafter_version"])
def test_new_weights_make_the_past_count_less_once(which: str) -> None:
    estimators = taught()
    before = estimators.acceptance.hazard_ratio
    assert not estimators.follow(decode_state(60, 4))
    assert estimators.follow(decode_state(60, 4, **{which: 1}))
    after = estimators.acceptance.hazard_ratio
    assert 1.0 < after < before - 0.1
    assert not estimators.follow(decode_state(61, 4, **{which: 1}))
    assert estimators.acceptance.hazard_ratio == after


def one_node_each(step: int, batch: int) -> StepRecord:
    """Scored 0.75; every second one is accepted. Half as slow again as expected."""
    draft = first_nodes(np.arange(batch) % 2 == 0, 0.75)
    return record_of(decode_state(step, batch), draft, slower=1.5)


def test_new_weights_leave_what_is_known_of_costs_and_how_surely() -> None:
    estimators = make_estimators()
    search = ShapeSearch(hand_profile(0.8, COST), max_nodes=1, max_depth=1)

    def choose() -> Chosen:
        known = {name: getattr(estimators, name) for name in ("acceptance", "costs", "record")}
        return search.choose(16, 1600, **known, widths=[1])

    def observe(step: int) -> None:
        record = one_node_each(step, 16)
        estimators.observe_draft(record)
        estimators.observe_choice(record, choose())
        estimators.observe_costs(record)

    def costs() -> list[float]:
        return [estimators.record.ratios(1, 16)[1], estimators.costs.draft, estimators.costs.verify]

    for step in range(40):
        observe(step)
    known, certain, hazard = costs(), deepcopy(estimators), estimators.acceptance.hazard_ratio
    assert known[0] > 1.1 and hazard > 1.3
    assert estimators.follow(decode_state(40, 16, weight_version=1))
    assert costs() == known and 1.0 < estimators.acceptance.hazard_ratio < hazard
    assert estimators.record.ratios(1, 16) == certain.record.ratios(1, 16)
    # the same step then: acceptance goes further, costs as far
    moved = []
    for each in (estimators, certain):
        before = each.acceptance.hazard_ratio
        each.observe_draft(record_of(decode_state(41, 4), first_nodes(np.ones(4, dtype=bool), 0.75)))
        each.record.observe(1, 16, tokens=1.0, seconds=1.0)
        moved.append(before / each.acceptance.hazard_ratio)
    assert moved[0] - 1.0 > 2.0 * (moved[1] - 1.0) > 0.0
    assert estimators.record.ratios(1, 16) == certain.record.ratios(1, 16)


def test_a_batch_twice_as_large_counts_the_past_by_its_share() -> None:
    larger, much_larger, same = taught(), taught(), taught()
    known = same.acceptance.hazard_ratio
    assert not same.follow(decode_state(60, 4 * OTHER_BATCH - 1))
    assert same.acceptance.hazard_ratio == known and not same.is_other_batch
    assert larger.follow(decode_state(60, 4 * OTHER_BATCH)) and larger.is_other_batch
    assert much_larger.follow(decode_state(60, 16 * OTHER_BATCH))
    assert 1.0 < much_larger.acceptance.hazard_ratio < larger.acceptance.hazard_ratio < known
    # said once; a draft of it ends it
    assert not larger.follow(decode_state(61, 4 * OTHER_BATCH))
    larger.observe_draft(record_of(decode_state(61, 8), half_accepted(8)))
    assert not larger.is_other_batch


def test_a_revived_drafter_is_not_judged_by_what_the_dead_one_did() -> None:
    estimators = make_estimators()
    dead, alive = (draft_log([[0.8]] * 4, [1] * 4, [n] * 4) for n in (0, 1))
    step = 0
    while not estimators.collapse.suspended:
        estimators.observe_draft(record_of(decode_state(step, 4), dead))
        step += 1
    ratios = [estimators.acceptance.hazard_ratio]
    while estimators.collapse.suspended:
        # only the watch over the drafter is told
        estimators.observe_draft(record_of(decode_state(step, 4), alive), with_acceptance=False)
        ratios.append(estimators.acceptance.hazard_ratio)
        step += 1
    assert set(ratios[:-1]) == {ratios[0]}
    assert ratios[-1] < ratios[0]


def test_only_steps_of_the_chosen_shape_enter_its_record() -> None:
    estimators = make_estimators()
    search = ShapeSearch(hand_profile(0.8, COST), max_nodes=8, max_depth=8)
    chosen = search.choose(
        4,
        400,
        acceptance=estimators.acceptance,
        costs=estimators.costs,
        record=estimators.record,
        widths=search.widths,
    )
    assert chosen.choice.kind == 1
    few, rest = half_accepted(4), chosen.choice.num_nodes
    estimators.observe_choice(record_of(decode_state(0, 4), None), chosen)
    # the last tokens of a response fall short
    estimators.observe_choice(record_of(decode_state(0, 4, remaining=rest), few), chosen)
    ratios = estimators.record.ratios
    assert ratios(1, 4) == ratios(0, 4) == [1.0, 1.0]
    estimators.observe_choice(record_of(decode_state(0, 4, remaining=rest + 1), few), chosen)
    assert ratios(1, 4)[0] < 1.0 and ratios(0, 4) == [1.0, 1.0]


def test_slower_steps_than_predicted_raise_the_costs() -> None:
    estimators = make_estimators()
    for step in range(100):
        estimators.observe_costs(record_of(decode_state(step, 4), half_accepted(4), slower=1.5))
    shape_free = estimators.costs
    assert shape_free.verify == pytest.approx(1.5 * 10.0 / 12.0, rel=0.2) and shape_free.draft > 1.2
    draft = shape_free.draft
    # a plain step says nothing of drafting
    estimators.observe_costs(record_of(decode_state(100, 4), None))
    assert estimators.costs.draft == draft
