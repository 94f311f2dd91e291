"""What a run teaches beyond its profile, by hand: factors fall, return, widen, and stay in bounds."""

import numpy as np
import pytest
from hand_profile import decode_state, draft_log, first_nodes

from core.records import PLAIN, Budget, StepRecord
from policies.recalibration import (
    COST_RANGE,
    DECAY,
    PRIOR_TOKENS,
    TRACK_PRIOR_TOKENS,
    TRACK_RANGE,
    WIDEN,
    AcceptanceRecalibration,
    CostRecalibration,
    TrackRecord,
)

PATH = np.array([0.8, 0.6, 0.3])
DRAFTED = Budget(num_nodes=4, depth=4, branching=1, width=1, reason="", refined=True)


def fed(model: AcceptanceRecalibration, steps: int, accepted: int, rows: int = 4) -> list[float]:
    """Factors after each of some steps in which so many of the rows' first nodes, scored 0.75, are accepted."""
    factors = []
    for _ in range(steps):
        model.observe(first_nodes(np.arange(rows) < accepted, 0.75))
        factors.append(model.factor)
    return factors


def test_the_factor_starts_at_one_and_falls_with_every_step_that_accepts_nothing() -> None:
    model = AcceptanceRecalibration(PATH)
    assert model.factor == 1.0
    factors = fed(model, 60, accepted=0)
    assert factors[0] == pytest.approx(PRIOR_TOKENS / (PRIOR_TOKENS + 3.0))
    assert (np.diff(factors) < 0).all()
    # three expected tokens a step for ever
    assert factors[-1] == pytest.approx(PRIOR_TOKENS / (PRIOR_TOKENS + 3 / (1 - DECAY)), rel=0.15)


def test_the_factor_rises_above_one_where_the_estimates_are_too_low() -> None:
    factors = fed(AcceptanceRecalibration(PATH), 60, accepted=4)
    assert (np.diff(factors) > 0).all()
    assert 1.0 < factors[-1] < 4 / 3


def test_the_factor_stays_at_one_where_what_is_expected_is_accepted() -> None:
    assert fed(AcceptanceRecalibration(PATH), 100, accepted=3) == pytest.approx([1.0] * 100)


def test_the_factor_returns_to_one_with_agreement() -> None:
    model = AcceptanceRecalibration(PATH)
    low = fed(model, 50, accepted=0)[-1]
    factors = fed(model, 300, accepted=3)
    assert low < 0.5
    assert (np.diff(factors) > 0).all()
    assert factors[-1] == pytest.approx(1.0, abs=1e-3)


def test_new_weights_make_the_past_count_less_by_hand() -> None:
    model = AcceptanceRecalibration(PATH)
    fed(model, 1, accepted=0, rows=40)
    assert model.factor == pytest.approx(40 / (40 + 30))
    model.widen()
    assert model.factor == pytest.approx(40 / (40 + 30 * WIDEN))
    # levels: 30 of 40 passed the first by score, against a prior of 0.8
    assert model.conditional[0] == pytest.approx((40 * 0.8 + 30 * WIDEN) / (40 + 40 * WIDEN))


def test_new_weights_are_believed_faster() -> None:
    stale, widened = AcceptanceRecalibration(PATH), AcceptanceRecalibration(PATH)
    for model in (stale, widened):
        fed(model, 50, accepted=0)
    widened.widen()
    assert fed(widened, 10, accepted=3)[-1] > fed(stale, 10, accepted=3)[-1] + 0.1


def test_levels_start_from_the_profiles_path() -> None:
    model = AcceptanceRecalibration(PATH)
    assert model.conditional == pytest.approx([0.8, 0.75, 0.5])
    assert model.path == pytest.approx(PATH)


def test_levels_learn_from_scores_by_hand() -> None:
    model = AcceptanceRecalibration(PATH)
    model.observe(draft_log([[0.9, 0.45], [0.7, 0.35]], [2, 1], [2, 0]))
    # two samples, 1.6 expected to pass the first level, 0.8 of these the second; the third was not drafted
    assert model.conditional == pytest.approx([(32 + 1.6) / (40 + 2), (30 + 0.8) / (40 + 1.6), 0.5])
    assert model.path == pytest.approx(np.cumprod(model.conditional))


def test_levels_of_a_tree_learn_from_their_best_candidates() -> None:
    model = AcceptanceRecalibration(PATH)
    model.observe(draft_log([[0.2, 0.6, 0.1, 0.3, 0.5, 0.4]], [6], [1], level_sizes=(2, 4)))
    assert model.conditional[:2] == pytest.approx([(32 + 0.6) / 41, (30 + 0.5) / 40.6])


def test_levels_deeper_than_the_profile_are_passed_over() -> None:
    model = AcceptanceRecalibration(PATH)
    model.observe(draft_log([[0.9, 0.8, 0.7, 0.6, 0.5]], [5], [5]))
    assert len(model.conditional) == 3


def test_a_path_that_ends_at_nought_stays_finite() -> None:
    model = AcceptanceRecalibration(np.array([0.5, 0.0, 0.0]))
    assert np.isfinite(model.conditional).all()
    assert model.path[1] < 1e-3
    assert (np.diff(model.path) <= 0).all()


def test_estimates_that_are_no_numbers_count_as_nought_and_poison_nothing() -> None:
    model = AcceptanceRecalibration(PATH)
    broken = np.full((2, 2), np.nan)
    model.observe(draft_log(broken, [1, 2], [0, 0]))
    model.observe(draft_log(broken, [2, 2], [0, 0], level_sizes=(2,)))
    assert np.isfinite(model.factor)
    assert np.isfinite(model.conditional).all()
    fed(model, 300, accepted=3)
    assert model.factor == pytest.approx(1.0, abs=1e-3)


def step(draft_s: float, verify_s: float, budget: Budget = DRAFTED) -> StepRecord:
    return StepRecord(
        state=decode_state(),
        budget=budget,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_accepted_rank2_plus=0,
        num_emitted_tokens=1,
        draft_s=draft_s,
        verify_s=verify_s,
        accept_s=0.0,
        other_s=0.0,
    )


def test_cost_factors_move_slowly_even_when_a_step_takes_a_hundred_times_as_long() -> None:
    costs = CostRecalibration()
    costs.observe(step(1.0, 0.02), draft_s=0.01, verify_s=0.02)
    assert costs.draft == pytest.approx(np.exp(0.025))
    assert costs.verify == pytest.approx(1.0)
    costs.observe(step(1e-9, 0.02), draft_s=0.01, verify_s=0.02)
    assert costs.draft == pytest.approx(1.0)


def test_cost_factors_settle_where_the_costs_are() -> None:
    costs = CostRecalibration()
    for _ in range(200):
        costs.observe(step(0.015, 0.014), draft_s=0.01, verify_s=0.02)
    assert costs.draft == pytest.approx(1.5, rel=1e-3)
    assert costs.verify == pytest.approx(0.7, rel=1e-3)


def test_cost_factors_are_bounded() -> None:
    costs = CostRecalibration()
    for _ in range(500):
        costs.observe(step(9.0, 0.0), draft_s=0.01, verify_s=0.02)
    assert (costs.verify, costs.draft) == COST_RANGE


def test_a_plain_step_says_nothing_of_drafting() -> None:
    costs = CostRecalibration()
    costs.observe(step(1.0, 0.03, PLAIN), draft_s=0.01, verify_s=0.02)
    assert costs.draft == 1.0
    assert costs.verify > 1.0


def test_a_prediction_of_nought_is_survived() -> None:
    costs = CostRecalibration()
    costs.observe(step(1.0, 0.0), draft_s=0.0, verify_s=0.0)
    assert np.isfinite([costs.draft, costs.verify]).all()


def test_a_track_record_is_delivered_over_expected_with_a_prior_of_one() -> None:
    record = TrackRecord()
    assert record.ratio(2) == 1.0
    record.observe(2, delivered=20.0, expected=60.0)
    assert record.ratio(2) == pytest.approx((TRACK_PRIOR_TOKENS + 20) / (TRACK_PRIOR_TOKENS + 60))
    assert record.ratio(0) == record.ratio(1) == record.ratio(3) == 1.0


def test_a_track_record_forgets_slowly() -> None:
    record = TrackRecord()
    for _ in range(1000):
        record.observe(1, delivered=5.0, expected=10.0)
    assert record.ratio(1) == pytest.approx((500 + 100) / (1000 + 100), rel=1e-3)
    for _ in range(1000):
        record.observe(1, delivered=10.0, expected=10.0)
    assert record.ratio(1) == pytest.approx(1.0, abs=1e-3)


def test_a_shape_that_is_not_used_is_forgiven_in_time() -> None:
    record = TrackRecord()
    for _ in range(50):
        record.observe(1, delivered=50.0, expected=200.0)
    assert record.ratio(1) < 0.3
    factors = []
    for _ in range(1500):
        record.observe(0, delivered=10.0, expected=10.0)
        factors.append(record.ratio(1))
    assert (np.diff(factors) > 0).all()
    # hundreds of steps: what does not pay is not tried every moment
    assert factors[100] < 0.4
    assert factors[-1] > 0.9


def test_a_track_record_corrects_within_bounds() -> None:
    record = TrackRecord()
    record.observe(1, delivered=0.0, expected=1000.0)
    record.observe(2, delivered=1000.0, expected=0.0)
    assert (record.factor(1), record.factor(2), record.factor(3)) == (*TRACK_RANGE, 1.0)
