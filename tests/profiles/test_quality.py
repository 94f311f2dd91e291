"""Figures of a fit's quality, by hand."""

import numpy as np
import pytest
from hand_tables import grown

from rlhfspec.profiles.cost import CostModel, CostTable, Shape
from rlhfspec.profiles.quality import (
    acceptance_quality,
    calibration_error,
    cost_quality,
    log_loss,
    reliability,
)


def test_reliability_by_hand() -> None:
    predicted = np.array([0.9, 0.1, 0.3, 0.7])
    accepted = np.array([True, False, True, False])
    # sorted: 0.1 no, 0.3 yes | 0.7 no, 0.9 yes
    bins = reliability(predicted, accepted, bins=2)
    assert bins == [(pytest.approx(0.2), 0.5, 2), (pytest.approx(0.8), 0.5, 2)]
    assert calibration_error(predicted, accepted, bins=2) == pytest.approx(0.3)
    assert calibration_error(predicted, accepted, bins=4) == pytest.approx((0.1 + 0.7 + 0.7 + 0.1) / 4)


def test_fewer_nodes_than_bins_are_a_bin_each_and_none_are_no_error() -> None:
    assert [count for _, _, count in reliability(np.array([0.5, 0.2]), np.array([True, False]))] == [1, 1]
    assert reliability(np.zeros(0), np.zeros(0, dtype=bool)) == []
    assert calibration_error(np.zeros(0), np.zeros(0, dtype=bool)) == 0.0


def test_log_loss_by_hand() -> None:
    loss = log_loss(np.array([0.8, 0.25]), np.array([True, False]))
    assert loss == pytest.approx(-(np.log(0.8) + np.log(0.75)) / 2)


def test_log_loss_of_a_sure_mistake_is_bounded() -> None:
    assert log_loss(np.array([1.0]), np.array([False])) == pytest.approx(-np.log(1e-6))
    assert log_loss(np.array([0.0, 1.0]), np.array([False, True])) == pytest.approx(0.0, abs=1e-5)


def test_a_model_that_is_right_has_next_to_no_calibration_error() -> None:
    random = np.random.default_rng(0)
    predicted = random.random(100_000)
    accepted = random.random(100_000) < predicted
    # 10,000 nodes a bin: a standard error of at most 0.005
    assert calibration_error(predicted, accepted) < 0.01
    assert calibration_error(predicted**2, accepted) > 0.1


def test_cost_errors_by_hand() -> None:
    ones = np.ones(5)
    shape = Shape(
        num_samples=ones,
        context_tokens=0 * ones,
        num_nodes=0 * ones,
        widest=0 * ones,
        levels=0 * ones,
        width=ones,
    )
    model = CostModel(draft=(1.0, *[0.0] * 12), verify=(2.0, *[0.0] * 17), rest=(3.0, *[0.0] * 5))
    measured = np.array([1.0, 2.0, 4.0, 0.5, 1.0])
    quality = cost_quality(
        model, CostTable(shape=shape, draft_s=measured, verify_s=2 * measured, rest_s=3 * ones)
    )
    # errors 0, 0.5, 0.75, 1, 0
    assert quality["draft_cost_median_rel_error"] == quality["verify_cost_median_rel_error"] == 0.5
    assert quality["draft_cost_p90_rel_error"] == pytest.approx(0.75 + 0.6 * 0.25)
    assert quality["rest_cost_median_rel_error"] == quality["rest_cost_p90_rel_error"] == 0.0


def test_acceptance_is_judged_on_prompts_it_was_not_fitted_on() -> None:
    drafts = grown(0, drafts=600)
    quality = acceptance_quality([drafts])
    held_out = drafts.where(drafts.sample % 2 == 1)
    assert quality["acceptance_held_out_nodes"] == len(held_out.nodes())
    # the features say nothing of these drafts' fates: only rank helps, and the fit must find that much
    assert quality["acceptance_log_loss"] < quality["acceptance_log_loss_constant"] - 0.02
    assert quality["acceptance_calibration_error"] < 0.1
    assert all(np.isfinite(value) for value in quality.values())
