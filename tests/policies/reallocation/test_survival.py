"""The survival curve against hand-made numbers; its prior; its limits."""

import numpy as np
import pytest

from rlhfspec.policies.reallocation.survival import MEMORY_SAMPLES, LengthHistory


def history(*lengths: int, prior_samples: float = 0.0) -> LengthHistory:
    made = LengthHistory(prior_samples=prior_samples)
    for length in lengths:
        made.note(length)
    return made


def test_the_curve_is_the_share_of_lengths_beyond_when_all_have_ended() -> None:
    curve = history(2, 4, 4, 6).survival(8)
    assert curve.probability == pytest.approx([1, 1, 3 / 4, 3 / 4, 1 / 4, 1 / 4, 0, 0, 0])


def test_an_open_response_counts_up_to_its_length_by_hand() -> None:
    # at 2 five are at risk, at 4 four of them, at 6 only the one that ends there
    curve = history(2, 4, 4, 6).survival(8, np.array([4]))
    assert curve.probability == pytest.approx([1, 1, 4 / 5, 4 / 5, 2 / 5, 2 / 5, 0, 0, 0])


def test_the_mean_remainder_is_that_of_the_lengths_beyond() -> None:
    remaining = history(2, 4, 4, 6).survival(8).mean_remaining()
    assert remaining[0] == pytest.approx(4.0)
    assert remaining[3] == pytest.approx((1 + 1 + 3) / 3)
    assert remaining[5] == pytest.approx(1.0)


def test_before_anything_is_known_what_remains_is_in_proportion_to_what_there_is() -> None:
    limit = 1 << 14
    curve = LengthHistory().survival(limit)
    # a tail of t to the power of -2: half get 0.414 times as many again, of those they have and an offset
    grows = 2**0.5 - 1
    offset = limit / 8 / grows
    for tokens in (0, 100, 1000):
        then = tokens + round(grows * (tokens + offset))
        assert curve.probability[then] / curve.probability[tokens] == pytest.approx(0.5, abs=0.001)
    remaining = curve.mean_remaining()
    assert remaining[1000] > remaining[100] > remaining[0]


def test_no_response_is_longer_than_the_limit() -> None:
    curve = history(3, 5, prior_samples=1.0).survival(6, np.array([5, 5]))
    assert curve.probability[6] == 0.0
    assert curve.mean_remaining()[5] == pytest.approx(1.0)


def test_lengths_above_the_present_limit_are_cut_to_it() -> None:
    assert history(2, 9).survival(4).probability == pytest.approx([1, 1, 1 / 2, 1 / 2, 0])


def test_evidence_overrides_the_prior_by_hand() -> None:
    # limit 8: the prior's median is 1, its offset 1 / 0.4142; one prior sample against nine that end at 2
    offset = 1 / (2**0.5 - 1)
    curve = history(*[2] * 9, prior_samples=1.0).survival(8)
    assert curve.probability[1] == pytest.approx(1 - (1 / 2) / 10)
    hazard = (9 + 1 - ((offset + 1) / (offset + 2)) ** 2) / 10
    assert curve.probability[2] == pytest.approx(curve.probability[1] * (1 - hazard))


def test_earlier_lengths_count_until_this_run_has_its_own() -> None:
    earlier = [100] * 20
    taught = LengthHistory(earlier_lengths=earlier)
    assert taught.survival(400).probability[99] > 0.8
    assert taught.survival(400).probability[101] < 0.2
    for _ in range(200):
        taught.note(10)
    assert taught.survival(400).probability[11] < 0.1


def test_the_curve_never_rises_and_starts_at_one() -> None:
    random = np.random.default_rng(0)
    made = history(*random.integers(1, 60, 30).tolist(), prior_samples=1.0)
    curve = made.survival(64, random.integers(0, 64, 20)).probability
    assert curve[0] == 1.0
    assert (np.diff(curve) <= 0).all()


def test_the_past_fades_when_very_much_is_known() -> None:
    made = history(*[10] * MEMORY_SAMPLES)
    for _ in range(MEMORY_SAMPLES):
        made.note(20)
    # the first half has been halved twice, the second half once on average
    assert made.survival(64).probability[15] > 0.6
