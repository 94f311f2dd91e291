"""What a run teaches beyond its profile, by hand: factors fall, return, widen, and stay in bounds."""

import math

import numpy as np
import pytest
from hand_profile import decode_state, draft_log, first_nodes

from rlhfspec.core.decode_records import PLAIN, Budget, StepRecord
from rlhfspec.policies.drafting.recalibration import (
    COST_RANGE,
    HAZARD_RANGE,
    WIDEN,
    AcceptanceRecalibration,
    CostRecalibration,
)

PATH = np.array([0.8, 0.6, 0.3])
DRAFTED = Budget(num_nodes=4, depth=4, branching=1, width=1, reason="", refined=True)


def fed(model: AcceptanceRecalibration, steps: int, accepted: int, rows: int = 4) -> list[float]:
    """Hazard ratios after each of some steps in which so many of the rows' first nodes, scored 0.75, are accepted."""
    ratios = []
    for _ in range(steps):
        model.observe(first_nodes(np.arange(rows) < accepted, 0.75))
        ratios.append(model.hazard_ratio)
    return ratios


def chains(
    rng: np.random.Generator, ratio: float, *, rows: int = 16, levels: int = 6, whole: bool = False
) -> tuple[np.ndarray, list[int], list[int]]:
    """Path scores, nodes verified and accepted of drafts whose levels are rejected `ratio` times as often."""
    conditional = rng.uniform(0.6, 0.99, (rows, levels))
    verified = np.full(rows, levels) if whole else rng.integers(0, levels + 1, rows)
    passed = rng.random((rows, levels)) < conditional**ratio
    accepted = np.minimum(np.cumprod(passed, axis=1).sum(axis=1), verified)
    return np.cumprod(conditional, axis=1), verified.tolist(), accepted.tolist()


def ratio_of(rejections: float, exposure: float) -> float:
    """By hand: with three rejections or three expected half of the logarithm counts."""
    most = max(rejections, exposure)
    return ((rejections + 0.1) / (exposure + 0.1)) ** (most / (most + 3.0))


def test_the_hazard_ratio_of_one_step_by_hand() -> None:
    model = AcceptanceRecalibration(PATH)
    assert model.hazard_ratio == 1.0
    model.observe(draft_log([[0.9, 0.45], [0.8, 0.4], [0.7, 0.35]], [2, 1, 1], [1, 1, 0]))
    # passed: the first level of two; rejected: the second level of the first, which passes by half, and the first of
    # the third, where in them is unknown
    exposure = -math.log(0.9) - math.log(0.8)
    for hazard in (math.log(2.0), -math.log(0.7)):
        exposure += 1.0 - hazard / (math.exp(hazard) - 1.0)
    expected = ratio_of(2, exposure)
    assert model.hazard_ratio == pytest.approx(expected, rel=1e-5)
    scores = np.array([[0.9, 0.45]])
    assert model.corrected(scores) == pytest.approx(scores**expected, rel=1e-5)


@pytest.mark.parametrize("ratio", [0.4, 1.0, 3.0, 8.0])
def test_the_hazard_ratio_converges_to_the_true_one(ratio: float) -> None:
    rng, model, seen = np.random.default_rng(5), AcceptanceRecalibration(PATH), []
    for _ in range(600):
        model.observe(draft_log(*chains(rng, ratio)))
        seen.append(model.hazard_ratio)
    assert np.mean(seen[200:]) == pytest.approx(ratio, rel=0.15)


def test_the_hazard_ratio_corrects_every_level() -> None:
    rng, model = np.random.default_rng(6), AcceptanceRecalibration(PATH)
    for _ in range(300):
        model.observe(draft_log(*chains(rng, 4.0, whole=True)))
    scores, _, _ = chains(rng, 4.0, rows=4000)
    truth = (scores**4.0).mean(axis=0)
    assert model.corrected(scores).mean(axis=0) == pytest.approx(truth, rel=0.25, abs=0.01)
    by_factor = scores.mean(axis=0) * truth.sum() / scores.mean(axis=0).sum()
    assert by_factor[0] < 0.7 * truth[0] and by_factor[-1] > 3 * truth[-1]


def test_a_tree_level_is_accepted_if_any_verified_candidate_is() -> None:
    tree, chain = AcceptanceRecalibration(PATH), AcceptanceRecalibration(PATH)
    # verified: both of the first level, two of the four of the second
    tree.observe(
        draft_log([[0.2, 0.6, 0.1, 0.25, 0.3, 0.05]], [4], [1], level_sizes=(2, 4)),
    )
    chain.observe(draft_log([[0.8, 0.55]], [2], [1]))
    assert tree.hazard_ratio == pytest.approx(chain.hazard_ratio, rel=1e-6)


def test_nodes_beyond_a_samples_limit_are_not_observed() -> None:
    cut, whole = AcceptanceRecalibration(PATH), AcceptanceRecalibration(PATH)
    cut.observe(draft_log([[0.9, 0.0, 0.0], [0.8, 0.0, 0.0], [0.0, 0.0, 0.0]], [3, 3, 3], [3, 0, 2]))
    whole.observe(draft_log([[0.9], [0.8]], [1, 1], [1, 0]))
    assert cut.hazard_ratio == whole.hazard_ratio != 1.0


def test_the_ratio_rises_with_rejections_and_stays_in_its_range() -> None:
    ratios = fed(AcceptanceRecalibration(PATH), 300, accepted=0)
    assert (np.diff(ratios[:20]) > 0).all()
    assert 5.0 < ratios[-1] <= HAZARD_RANGE[1]


def test_the_ratio_falls_below_one_where_the_estimates_are_too_low() -> None:
    ratios = fed(AcceptanceRecalibration(PATH), 60, accepted=4)
    assert (np.diff(ratios) <= 0).all()
    assert HAZARD_RANGE[0] <= ratios[-1] < 0.5


def test_the_ratio_stays_at_one_where_what_is_expected_is_accepted() -> None:
    assert fed(AcceptanceRecalibration(PATH), 200, accepted=3) == pytest.approx([1.0] * 200, abs=0.05)


def test_the_ratio_returns_to_one_with_agreement() -> None:
    model = AcceptanceRecalibration(PATH)
    high = fed(model, 50, accepted=0)[-1]
    ratios = fed(model, 400, accepted=3)
    assert high > 3.0
    assert ratios[-1] == pytest.approx(1.0, abs=0.05)


def test_a_large_batch_corrects_the_ratio_faster_than_a_small_one() -> None:
    few, many = AcceptanceRecalibration(PATH), AcceptanceRecalibration(PATH)
    for model, rows in ((few, 4), (many, 64)):
        fed(model, 100, accepted=0)
        fed(model, 10, accepted=3 * rows // 4, rows=rows)
    assert many.hazard_ratio < 1.5 < few.hazard_ratio


def test_new_weights_make_the_past_count_less_by_hand() -> None:
    model = AcceptanceRecalibration(PATH)
    fed(model, 1, accepted=0, rows=40)
    hazard = -math.log(0.75)
    exposure = 40 * (1.0 - hazard / (math.exp(hazard) - 1.0))
    assert model.hazard_ratio == pytest.approx(ratio_of(40, exposure))
    model.widen()
    assert model.hazard_ratio == pytest.approx(ratio_of(40 * WIDEN, exposure * WIDEN))
    # levels: 30 of 40 passed the first by score, against a prior of 0.8
    estimated = (40 * 0.8 + 30 * WIDEN) / (40 + 40 * WIDEN)
    assert model.conditional[0] == pytest.approx(estimated**model.hazard_ratio)


def test_after_new_weights_the_ratio_adapts_faster() -> None:
    stale, widened = AcceptanceRecalibration(PATH), AcceptanceRecalibration(PATH)
    for model in (stale, widened):
        fed(model, 50, accepted=0)
    widened.widen()
    assert fed(widened, 10, accepted=3)[-1] < fed(stale, 10, accepted=3)[-1] - 0.1


def test_levels_start_from_the_profiles_path() -> None:
    model = AcceptanceRecalibration(PATH)
    assert model.conditional == pytest.approx([0.8, 0.75, 0.5])
    assert model.path == pytest.approx(PATH)


def test_levels_learn_from_scores_by_hand() -> None:
    model = AcceptanceRecalibration(PATH)
    model.observe(draft_log([[0.9, 0.45], [0.7, 0.35]], [2, 1], [2, 0]))
    # two samples, 1.6 expected to pass the first level, 0.8 of these the second; the third was not drafted
    estimated = np.array([(32 + 1.6) / (40 + 2), (30 + 0.8) / (40 + 1.6), 0.5])
    assert model.conditional == pytest.approx(estimated**model.hazard_ratio)
    assert model.path == pytest.approx(np.cumprod(model.conditional))


def test_levels_of_a_tree_learn_from_their_best_candidates() -> None:
    model = AcceptanceRecalibration(PATH)
    model.observe(draft_log([[0.2, 0.6, 0.1, 0.3, 0.5, 0.4]], [6], [1], level_sizes=(2, 4)))
    estimated = np.array([(32 + 0.6) / 41, (30 + 0.5) / 40.6])
    assert model.conditional[:2] == pytest.approx(estimated**model.hazard_ratio)


def test_levels_deeper_than_the_profile_are_passed_over() -> None:
    model = AcceptanceRecalibration(PATH)
    model.observe(draft_log([[0.9, 0.8, 0.7, 0.6, 0.5]], [5], [5]))
    assert len(model.conditional) == 3


def test_a_score_of_zero_keeps_the_ratio_finite() -> None:
    model = AcceptanceRecalibration(np.array([0.5, 0.0, 0.0]))
    assert np.isfinite(model.conditional).all()
    assert model.path[1] < 1e-3
    assert (np.diff(model.path) <= 0).all()


def test_nan_scores_count_as_zero() -> None:
    model = AcceptanceRecalibration(PATH)
    broken = np.full((2, 2), np.nan)
    model.observe(draft_log(broken, [1, 2], [0, 0]))
    model.observe(draft_log(broken, [2, 2], [0, 0], level_sizes=(2,)))
    assert np.isfinite(model.hazard_ratio)
    assert np.isfinite(model.conditional).all()
    fed(model, 400, accepted=3)
    assert model.hazard_ratio == pytest.approx(1.0, abs=0.05)


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


def test_one_outlier_moves_a_cost_factor_little() -> None:
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


def test_a_plain_step_leaves_the_draft_cost_factor() -> None:
    costs = CostRecalibration()
    costs.observe(step(1.0, 0.03, PLAIN), draft_s=0.01, verify_s=0.02)
    assert costs.draft == 1.0
    assert costs.verify > 1.0


def test_a_predicted_cost_of_zero_keeps_the_factors_finite() -> None:
    costs = CostRecalibration()
    costs.observe(step(1.0, 0.0), draft_s=0.0, verify_s=0.0)
    assert np.isfinite([costs.draft, costs.verify]).all()
