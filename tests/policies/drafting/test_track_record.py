"""What shapes deliver over what was expected: by batch size, shared where one is untried, forgiven in time."""

import numpy as np
import pytest

from rlhfspec.policies.drafting.recalibration import DOUBT, RANGE, TrackRecord


def test_a_ratio_goes_from_one_towards_delivered_over_expected() -> None:
    record, ratios = TrackRecord(), [1.0]
    assert record.ratio(0, 4) == record.ratio(2, 4) == 1.0
    for _ in range(60):
        record.observe(0, 4, delivered=1.0, expected=3.0)
        ratios.append(record.ratio(0, 4))
    assert (np.diff(ratios) < 0).all()
    # one step says little, a few dozen nearly all
    assert 0.8 < ratios[1] < 0.9 and 1 / 3 < ratios[-1] < 0.4


def test_a_step_that_stands_for_four_counts_as_four_equal_ones() -> None:
    one, four = TrackRecord(), TrackRecord()
    for _ in range(4):
        one.observe(1, 4, delivered=0.5, expected=1.0)
    four.observe(1, 4, delivered=0.5, expected=1.0, num_steps=4)
    assert four.ratio(1, 4) == pytest.approx(one.ratio(1, 4), rel=0.02)


def test_the_past_fades() -> None:
    record = TrackRecord()
    for delivered in (0.5, 1.0):
        for _ in range(1000):
            record.observe(0, 1, delivered=delivered, expected=1.0)
        # the prior of one keeps a tenth of the weight
        assert abs(record.ratio(0, 1) - delivered) < 0.06
    assert record.ratio(0, 1) == pytest.approx(1.0, abs=1e-3)


def test_batches_of_one_power_of_two_share_a_record_and_others_have_their_own() -> None:
    record = TrackRecord()
    for _ in range(100):
        record.observe(1, 40, delivered=0.1, expected=1.0)
    assert record.ratio(1, 33) == record.ratio(1, 63) < 0.5
    assert record.ratio(1, 64) == record.ratio(1, 31) == 1.0


@pytest.mark.parametrize("delivered", [0.5, 2.0])
def test_an_untried_shape_shares_most_of_what_drafts_deliver_there(delivered: float) -> None:
    record = TrackRecord()
    for _ in range(1000):
        record.observe(1, 8, delivered=delivered, expected=1.0)
    tried, untried = np.log(record.ratio(1, 8)), np.log(record.ratio(3, 8))
    # same direction and not as far: what has proved itself leads what has not, and the other way round
    assert 0.6 < untried / tried < 0.9


def test_the_record_of_drafts_does_not_change_that_of_plain_decoding() -> None:
    record = TrackRecord()
    for _ in range(100):
        record.observe(1, 8, delivered=0.1, expected=1.0)
    assert record.ratio(0, 8) == 1.0
    for _ in range(100):
        record.observe(0, 8, delivered=0.1, expected=1.0)
    assert record.ratio(0, 8) < 0.5
    assert record.ratio(2, 16) == 1.0


def test_the_record_of_an_unused_shape_returns_to_one() -> None:
    record = TrackRecord()
    for _ in range(50):
        record.observe(1, 1, delivered=0.25, expected=1.0)
    assert record.ratio(1, 1) < 0.45
    ratios = []
    for _ in range(1500):
        record.observe(0, 1, delivered=1.0, expected=1.0)
        ratios.append(record.ratio(1, 1))
    assert (np.diff(ratios) > 0).all()
    # hundreds of steps: what does not pay is not tried every moment
    assert ratios[100] < 0.6
    assert ratios[-1] > 0.9


def test_factors_keep_within_bounds() -> None:
    record = TrackRecord()
    record.observe(1, 1, delivered=0.0, expected=1000.0)
    record.observe(2, 2, delivered=1000.0, expected=0.0)
    assert (record.factor(1, 1), record.factor(2, 2), record.factor(2, 4)) == (*RANGE, 1.0)


def test_untried_plain_decoding_is_overrated_by_a_tenth() -> None:
    record = TrackRecord()
    assert record.factor(0, 8) == pytest.approx(1.0 + DOUBT)
    for _ in range(300):
        record.observe(0, 8, delivered=1.0, expected=1.0)
    assert 1.0 < record.factor(0, 8) < 1.0 + 0.15 * DOUBT
    # .. and again when it has not been used for long
    for _ in range(1500):
        record.observe(1, 8, delivered=1.0, expected=1.0)
    assert record.factor(0, 8) > 1.0 + 0.9 * DOUBT
    assert record.factor(1, 8) == pytest.approx(1.0)
