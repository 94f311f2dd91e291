"""Costs of moves: start values, learning, robustness."""

import numpy as np
import pytest

from rlhfspec.profiles.transfer import LearntLine, PrefillModel, TransferModel


def test_predictions_start_from_the_given_values_by_hand() -> None:
    transfer = TransferModel(latency_s=0.01, bytes_per_s=1e9, open_s=0.2)
    assert transfer.seconds(50e6) == pytest.approx(0.06)
    assert transfer.seconds(np.array([0.0, 50e6]), cold=np.array([True, False])) == pytest.approx(
        [0.21, 0.06]
    )
    prefill = PrefillModel(fixed_s=0.005, token_s=1e-4, token_squared_s=1e-7)
    assert prefill.seconds(np.array([0, 100, 1000])) == pytest.approx([0.005, 0.016, 0.205])


def test_a_transfer_model_learns_latency_bandwidth_and_opening() -> None:
    random = np.random.default_rng(0)
    model = TransferModel()
    for _ in range(400):
        num_bytes, cold = int(random.uniform(1e5, 2e7)), bool(random.random() < 0.2)
        truth = 0.005 + num_bytes / 2.5e8 + 0.4 * cold
        model.observe(num_bytes, truth * np.exp(random.normal(0, 0.05)), cold=cold)
    for num_bytes in (1e5, 5e6, 2e7):
        for cold in (False, True):
            assert model.seconds(num_bytes, cold=cold) == pytest.approx(
                0.005 + num_bytes / 2.5e8 + 0.4 * cold, rel=0.1
            )


def test_a_prefill_model_learns_its_curve() -> None:
    random = np.random.default_rng(1)
    model = PrefillModel()
    for _ in range(400):
        tokens = int(random.uniform(16, 2048))
        model.observe(tokens, (0.002 + 5e-4 * tokens + 2e-7 * tokens**2) * np.exp(random.normal(0, 0.05)))
    for tokens in (64, 500, 2000):
        assert model.seconds(tokens) == pytest.approx(0.002 + 5e-4 * tokens + 2e-7 * tokens**2, rel=0.1)


def test_one_observation_already_helps_when_the_guess_was_far_off() -> None:
    model = TransferModel(latency_s=0.02, bytes_per_s=1e9)
    before = float(model.seconds(10_000_000))
    model.observe(10_000_000, 10 * before, cold=False)
    assert model.seconds(10_000_000) > 3 * before


def test_one_outlier_changes_a_learnt_line_little() -> None:
    model = TransferModel()
    for number in range(60):
        num_bytes = 1_000_000 * (1 + number % 10)
        model.observe(num_bytes, 0.02 + num_bytes / 1e9, cold=False)
    before = float(model.seconds(5e6))
    model.observe(5_000_000, 100 * before, cold=False)
    assert model.seconds(5e6) == pytest.approx(before, rel=0.1)


def test_a_line_follows_a_change() -> None:
    model = TransferModel()
    for bandwidth in (1e9, 1e8):
        for number in range(300):
            num_bytes = 1_000_000 * (1 + number % 10)
            model.observe(num_bytes, 0.02 + num_bytes / bandwidth, cold=False)
    assert model.seconds(1e7) == pytest.approx(0.12, rel=0.05)


def test_coefficients_are_never_negative_and_nonsense_is_passed_over() -> None:
    random = np.random.default_rng(2)
    line = LearntLine([0.01, 0.0, 0.5])
    for _ in range(200):
        line.observe(random.uniform(0, 2, 3).tolist(), float(random.uniform(1e-4, 0.1)))
        assert (line.coefficients >= 0).all()
    before = line.coefficients.copy()
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        line.observe([1.0, 1.0, 1.0], seconds)
    assert (line.coefficients == before).all()


def test_the_cost_of_opening_stays_as_given_without_cold_transfers() -> None:
    model = TransferModel(open_s=0.3)
    for number in range(2000):
        num_bytes = 1_000_000 * (1 + number % 10)
        model.observe(num_bytes, 0.02 + num_bytes / 1e9, cold=False)
    opening = model.seconds(1e6, cold=True) - model.seconds(1e6)
    assert opening == pytest.approx(0.3, rel=0.01)
