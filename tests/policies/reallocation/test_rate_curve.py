"""Rate curves: exact at their points, monotone everywhere, corrected slowly; the knee."""

from dataclasses import replace

import numpy as np
import pytest
from hand_profile import hand_cost, hand_profile

from rlhfspec.engine.calibration.profiler import NOTHING_DRAFTED
from rlhfspec.policies.reallocation.rate_curve import RateCurve, rate_curve_from_profile


def test_the_curve_passes_through_its_points_and_seconds_are_a_line_between_them() -> None:
    curve = RateCurve([4, 1], [200.0, 100.0])
    assert curve.goodput(np.array([1, 4])) == pytest.approx([100, 200])
    # 10 ms at 1, 20 ms at 4
    assert curve.seconds_per_token(np.array([1, 2, 3, 4])) == pytest.approx(
        [0.010, 0.04 / 3, 0.05 / 3, 0.020]
    )


def test_beyond_its_points_the_last_line_goes_on() -> None:
    curve = RateCurve([1, 4, 8], [100.0, 200.0, 250.0])
    assert curve.seconds_per_token(12) == pytest.approx(0.032 + 0.012)


def test_a_curve_of_one_point_is_saturated_there() -> None:
    curve = RateCurve([4], [200.0])
    assert curve.seconds_per_token(2) == pytest.approx(0.020)
    assert curve.goodput(40) == pytest.approx(200)


def test_below_one_sample_it_is_as_with_one() -> None:
    curve = RateCurve([1, 4], [100.0, 200.0])
    assert curve.seconds_per_token(np.array([0.0, 0.3, 1.0])) == pytest.approx([0.01] * 3)


def test_more_samples_never_deliver_less_together_nor_faster_each() -> None:
    random = np.random.default_rng(3)
    batch = np.arange(1, 200) / 2
    for _ in range(20):
        curve = RateCurve(random.integers(1, 60, 8), random.uniform(50, 500, 8))
        assert (np.diff(curve.goodput(batch)) >= -1e-9).all()
        assert (np.diff(curve.seconds_per_token(batch)) >= -1e-12).all()


@pytest.mark.parametrize("points", [([], []), ([1, 2], [10.0]), ([0], [10.0]), ([1], [0.0])])
def test_invalid_curves_are_refused(points: tuple) -> None:
    with pytest.raises(ValueError, match="above 0"):
        RateCurve(*points)


def test_a_profile_gives_the_goodput_policys_own_prediction() -> None:
    # forward 10 ms, half a ms a token behind 16; a level 1 ms, everything else 0.2 ms; the chain is accepted at 0.8
    cost = hand_cost(forward_ms=10.0, knee_tokens=16, knee_ms=0.5, level_ms=1.0)
    profile = hand_profile(0.8, cost)
    curve = rate_curve_from_profile(profile, max_nodes=4, max_depth=4)
    chain = np.cumsum(0.8 ** np.arange(1, 5))
    for batch in (1, 2, 32):
        seconds = [10.2 + n + 0.5 * max(batch * (n + 1) - 16, 0) for n in range(5)]
        best = max(batch * (1 + tokens) / s for tokens, s in zip([0, *chain], seconds, strict=True))
        assert curve.goodput(batch) == pytest.approx(1e3 * best, rel=1e-6)


def test_without_speculation_a_profile_gives_plain_decoding() -> None:
    cost = hand_cost(forward_ms=10.0, knee_tokens=16, knee_ms=0.5)
    curve = rate_curve_from_profile(hand_profile(0.8, cost), speculation=False)
    assert curve.seconds_per_token(np.array([1, 16, 32])) == pytest.approx([0.0102, 0.0102, 0.0182])


def test_with_look_ups_moves_are_planned_by_plain_decoding() -> None:
    cost = hand_cost(forward_ms=10.0, token_ms=0.1)
    profile = hand_profile(0.8, cost)
    curve = rate_curve_from_profile(replace(profile, yields=NOTHING_DRAFTED))
    plain = rate_curve_from_profile(profile, speculation=False)
    assert curve.goodput(np.array([1, 8, 64])) == pytest.approx(plain.goodput(np.array([1, 8, 64])))


def test_the_knee_is_where_a_flat_step_starts_to_grow() -> None:
    samples = np.arange(1, 65)
    seconds = np.maximum(0.010, 0.010 * samples / 16)
    assert RateCurve(samples, samples / seconds).knee(64) == 16


def test_a_curve_without_a_knee_has_it_at_the_end() -> None:
    assert RateCurve([1, 64], [100.0, 6400.0]).knee(32) == 32
    assert RateCurve([1, 64], [100.0, 200.0]).knee(2) == 2


def test_the_factor_settles_where_the_run_is_and_moves_slowly() -> None:
    curve = RateCurve([1, 4], [100.0, 200.0])
    curve.observe(np.array([4]), np.array([150.0]))
    assert 0.98 < curve.factor < 1.0
    for _ in range(300):
        curve.observe(np.array([1, 4, 4]), np.array([75.0, 150.0, 1e-3]))
    assert curve.factor == pytest.approx(0.75, rel=0.01)
    assert curve.goodput(4) == pytest.approx(150, rel=0.01)


READING = RateCurve([1, 4], [100.0, 200.0], context_tokens=[100, 400], context_token_s=[2e-5, 1e-5])
"Seconds per token 10 and 20 ms, of which 2 and 4 ms are reading contexts."


def test_longer_contexts_take_longer() -> None:
    counts = np.array([1, 4])
    assert READING.seconds_per_token(counts) == pytest.approx([0.010, 0.020])
    assert READING.seconds_per_token(counts, np.zeros(2)) == pytest.approx([0.008, 0.016])
    assert READING.seconds_per_token(counts, np.array([600, 1200])) == pytest.approx([0.020, 0.028])
    assert READING.goodput(counts, np.array([600, 1200])) == pytest.approx([50, 4 / 0.028])
    # between the points base and slope are lines, behind them the base is
    assert READING.seconds_per_token(2.5, 1000) == pytest.approx(0.012 + 0.015)
    assert READING.seconds_per_token(7, 1000) == pytest.approx(0.024 + 0.010)
    assert READING.context_token_s(np.array([1, 2.5, 9])) == pytest.approx([2e-5, 1.5e-5, 1e-5])


def test_contexts_never_explain_all_of_what_was_measured() -> None:
    curve = RateCurve([1], [100.0], context_tokens=[100], context_token_s=[1.0])
    assert curve.seconds_per_token(1, 0.0) == pytest.approx(0.001)
    assert curve.seconds_per_token(1, 100) == pytest.approx(0.010)


def test_the_factor_is_relative_to_the_measured_contexts() -> None:
    curve = READING.copy()
    for _ in range(100):
        curve.observe(np.array([4]), np.array([2 * 4 / 0.028]), np.array([1200]))
    assert curve.factor == pytest.approx(2.0, rel=0.01)
    assert curve.seconds_per_token(1, 600) == pytest.approx(0.010, rel=0.01)
    assert READING.factor == 1.0


@pytest.mark.parametrize(("context", "token_s"), [([1.0], [-1e-3]), ([-1.0], [1e-3]), ([1.0, 2.0], [1e-3])])
def test_contexts_that_cannot_be_are_refused(context: list[float], token_s: list[float]) -> None:
    with pytest.raises(ValueError, match="contexts and their costs"):
        RateCurve([1], [100.0], context_tokens=context, context_token_s=token_s)


def test_a_profile_knows_what_contexts_cost() -> None:
    # 10 us for each token that the forward reads, whatever is verified
    cost = hand_cost(forward_ms=10.0, context_token_ms=0.01)
    plain = rate_curve_from_profile(hand_profile(0.8, cost), speculation=False, context_tokens=100)
    for batch, context in ((1, 100), (4, 0), (16, 8000)):
        expected_s = 0.0102 + 1e-5 * context
        assert plain.seconds_per_token(batch, context) == pytest.approx(expected_s, rel=1e-3)
