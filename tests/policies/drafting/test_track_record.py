"""Tokens and seconds of shapes over those expected: by batch size, shared where one is untried, forgiven in time."""

import numpy as np
import pytest

from rlhfspec.policies.drafting.recalibration import DOUBT, RANGE, SLOWEST, TrackRecord


def ratio(record: TrackRecord, branching: int, num_samples: int) -> float:
    """Of tokens over seconds, each over those expected."""
    tokens, seconds = record.ratios(branching, num_samples)
    return tokens / seconds


def test_ratios_by_hand() -> None:
    record = TrackRecord()
    assert record.ratios(0, 4) == record.ratios(2, 4) == [1.0, 1.0]
    # ten steps as expected stand beside what was seen
    record.observe(1, 4, tokens=0.5, seconds=1.5)
    assert record.ratios(1, 4) == pytest.approx(
        (np.array([0.5, 1.5]) + 10 * (np.array([10.5, 11.5]) / 11) ** 0.75) / 11
    )
    record.observe(0, 4, tokens=1.0, seconds=2.0, num_steps=4)
    assert record.ratios(0, 4) == pytest.approx([1.0, (10 + 4 * 2.0) / 14])


@pytest.mark.parametrize(("tokens", "seconds"), [(1 / 3, 1.0), (1.0, 2.5), (0.5, 1.5)])
def test_a_ratio_goes_from_one_towards_what_was_seen(tokens: float, seconds: float) -> None:
    record, ratios = TrackRecord(), [1.0]
    for _ in range(60):
        record.observe(0, 4, tokens=tokens, seconds=seconds)
        ratios.append(ratio(record, 0, 4))
    assert (np.diff(ratios) < 0).all()
    # one step says little, a few dozen most
    assert 0.8 < ratios[1] < 0.95 and tokens / seconds < ratios[-1] < 1.4 * tokens / seconds


def test_a_step_that_stands_for_four_counts_as_four_equal_ones() -> None:
    one, four = TrackRecord(), TrackRecord()
    for _ in range(4):
        one.observe(1, 4, tokens=0.5, seconds=1.5)
    four.observe(1, 4, tokens=0.5, seconds=1.5, num_steps=4)
    assert four.ratios(1, 4) == pytest.approx(one.ratios(1, 4), rel=0.02)


def test_the_past_fades() -> None:
    record = TrackRecord()
    for seconds in (2.0, 1.0):
        for _ in range(1000):
            record.observe(0, 1, tokens=1.0, seconds=seconds)
        # the prior of one keeps a tenth of the weight
        assert abs(record.ratios(0, 1)[1] - seconds) < 0.11
    assert ratio(record, 0, 1) == pytest.approx(1.0, abs=1e-3)


def test_batches_of_one_power_of_two_share_a_record_and_others_have_their_own() -> None:
    record = TrackRecord()
    for _ in range(100):
        record.observe(1, 40, tokens=0.2, seconds=2.0)
    assert ratio(record, 1, 33) == ratio(record, 1, 63) < 0.5
    assert ratio(record, 1, 64) == ratio(record, 1, 31) == 1.0


@pytest.mark.parametrize("seen", [{"tokens": 0.5, "seconds": 1.0}, {"tokens": 1.0, "seconds": 0.5}])
def test_an_untried_shape_shares_most_of_what_drafts_are_over_expected_there(seen: dict[str, float]) -> None:
    record = TrackRecord()
    for _ in range(1000):
        record.observe(1, 8, **seen)
    tried, untried = np.log(ratio(record, 1, 8)), np.log(ratio(record, 3, 8))
    # same direction and not as far: what has proved itself leads what has not, and the other way round
    assert 0.6 < untried / tried < 0.9


def test_the_record_of_drafts_does_not_change_that_of_plain_decoding() -> None:
    record = TrackRecord()
    for _ in range(100):
        record.observe(1, 8, tokens=0.5, seconds=2.0)
    assert ratio(record, 0, 8) == 1.0
    for _ in range(100):
        record.observe(0, 8, tokens=1.0, seconds=2.5)
    assert ratio(record, 0, 8) < 0.5
    assert ratio(record, 2, 16) == 1.0


def test_the_record_of_an_unused_shape_returns_to_one() -> None:
    record = TrackRecord()
    for _ in range(50):
        record.observe(1, 1, tokens=0.5, seconds=2.0)
    assert ratio(record, 1, 1) < 0.45
    ratios = []
    for _ in range(4000):
        record.observe(0, 1, tokens=1.0, seconds=1.0)
        ratios.append(ratio(record, 1, 1))
    assert (np.diff(ratios) > 0).all()
    # hundreds of steps: what does not pay is not tried every moment
    assert ratios[100] < 0.6
    assert ratios[-1] > 0.9


def test_tokens_count_within_bounds_and_seconds_in_full() -> None:
    record = TrackRecord()
    for branching, tokens, seconds in ((1, 0.0, 1.0), (2, 9.0, 1.0), (3, 1.0, 2.0)):
        record.observe(branching, 1 << branching, tokens=tokens, seconds=seconds, num_steps=1000)
    assert (record.factor(1, 2), record.factor(2, 4), record.factor(2, 2)) == (*RANGE, RANGE[0])
    assert record.factor(3, 8) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(("seconds", "counted"), [(1e3, SLOWEST), (1e-3, 1 / SLOWEST)])
def test_one_stall_counts_no_more_than_a_slow_step(seconds: float, counted: float) -> None:
    record, bounded = TrackRecord(), TrackRecord()
    record.observe(0, 4, tokens=1.0, seconds=seconds)
    bounded.observe(0, 4, tokens=1.0, seconds=counted)
    assert record.ratios(0, 4) == bounded.ratios(0, 4)


def test_untried_plain_decoding_is_overrated_by_a_tenth() -> None:
    record = TrackRecord()
    assert record.factor(0, 8) == pytest.approx(1.0 + DOUBT)
    for _ in range(300):
        record.observe(0, 8, tokens=1.0, seconds=1.0)
    assert 1.0 < record.factor(0, 8) < 1.0 + 0.15 * DOUBT
    # .. and again when it has not been used for long
    for _ in range(4000):
        record.observe(1, 8, tokens=1.0, seconds=1.0)
    assert record.factor(0, 8) > 1.0 + 0.9 * DOUBT
    assert record.factor(1, 8) == pytest.approx(1.0)
