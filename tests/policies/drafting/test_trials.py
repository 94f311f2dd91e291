"""Probes of a drafter that is not used: paid from plain time, or at once where they may decide something."""

from dataclasses import replace

import numpy as np
import pytest
from hand_profile import decode_state, first_nodes, hand_cost, hand_profile

from rlhfspec.core.decode_records import PLAIN, StepRecord
from rlhfspec.policies.drafting.estimators import Estimators
from rlhfspec.policies.drafting.shape_search import Chosen, ShapeSearch
from rlhfspec.policies.drafting.trials import PROBE_SHARE, Probes

PROFILE = hand_profile(0.02, hand_cost(forward_ms=10.0, token_ms=0.5, level_ms=1.0))
SEARCH = ShapeSearch(PROFILE, max_nodes=8, max_depth=8)
PLAIN_S = 0.0107


def plain_step(step: int, batch: int = 1) -> StepRecord:
    return StepRecord(
        state=decode_state(step, batch),
        budget=PLAIN,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_accepted_rank2_plus=0,
        num_emitted_tokens=batch,
        draft_s=0.0,
        verify_s=PLAIN_S,
        accept_s=0.0,
        other_s=0.0,
        draft=None,
    )


def choose(estimators: Estimators, batch: int = 1, context: int = 100) -> Chosen:
    return SEARCH.choose(
        batch,
        batch * context,
        acceptance=estimators.acceptance,
        costs=estimators.costs,
        record=estimators.record,
        widths=[1],
    )


def steps_until_due(token_s: float, *, context: int = 100) -> int:
    account, estimators = Probes(token_s), Estimators(PROFILE, 8)
    chosen = choose(estimators, context=context)
    for step in range(10_000):
        if account.is_due(1, chosen, estimators, SEARCH):
            return step
        account.decoded_plainly(plain_step(step))
    raise AssertionError("never due")


def test_a_probe_is_due_when_a_two_hundredth_of_the_plain_time_pays_for_it() -> None:
    # two levels, and two nodes more to verify
    probe_s = 2 * 1.0e-3 + 2 * 0.5e-3
    assert steps_until_due(0.0) == pytest.approx(probe_s / (PROBE_SHARE * PLAIN_S), abs=1)


def test_a_probe_pays_for_catching_up_with_the_context_at_most() -> None:
    without, with_all = steps_until_due(0.0), steps_until_due(1e-4, context=100)
    assert with_all == pytest.approx((3e-3 + 100 * 1e-4) / (PROBE_SHARE * PLAIN_S), abs=1)
    assert without < steps_until_due(1e-4, context=10) < with_all


def test_a_draft_resets_the_probe_account() -> None:
    account, estimators = Probes(0.0), Estimators(PROFILE, 8)
    chosen = choose(estimators)
    for step in range(100):
        account.decoded_plainly(plain_step(step))
    assert account.is_due(1, chosen, estimators, SEARCH)
    account.drafted()
    assert not account.is_due(1, chosen, estimators, SEARCH)


def test_a_larger_batch_probes_a_drafter_suspended_by_one_sample_at_once() -> None:
    profile = hand_profile(0.9, hand_cost(forward_ms=10.0, token_ms=0.5, level_ms=1.0))
    account, estimators = Probes(0.0), Estimators(profile, 8)
    step = 0
    while not estimators.collapse.suspended:
        draft = first_nodes(np.zeros(1, dtype=bool))
        estimators.observe_draft(replace(plain_step(step), draft=draft))
        step += 1
    assert not account.is_due(1, choose(estimators), estimators, SEARCH)
    assert account.is_due(2, choose(estimators, 2), estimators, SEARCH)
