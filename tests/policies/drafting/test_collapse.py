"""Collapse of the drafter: noticed within ten decode steps, hardly ever where there is none, taken back on recovery."""

from collections.abc import Iterator

import numpy as np
import pytest
from hand_profile import draft_log, first_nodes

from rlhfspec.core.decode_records import DraftLog
from rlhfspec.policies.drafting.collapse import LOWEST_USUAL, CollapseDetector

DEAD = np.zeros(1, dtype=bool)


def outcomes(batch: int, acceptance: np.ndarray, seed: int) -> Iterator[DraftLog]:
    """Random outcomes of first nodes; the detector sees how many were accepted, not which."""
    logs = [first_nodes(np.arange(batch) < count) for count in range(batch + 1)]
    return (logs[count] for count in np.random.default_rng(seed).binomial(batch, acceptance))


def steps_to_suspension(detector: CollapseDetector, batch: int = 1, start: int = 0) -> int:
    """Decode steps with nothing accepted until drafting is suspended."""
    for number in range(1, 60):
        detector.observe(start + number, first_nodes(np.zeros(batch, dtype=bool)))
        if detector.suspended:
            return number
    raise AssertionError("never suspended")


@pytest.mark.parametrize("usual", [0.95, 0.9, 0.8, 0.7])
@pytest.mark.parametrize("batch", [1, 4, 32])
def test_a_dead_drafter_is_suspended_within_ten_decode_steps(usual: float, batch: int) -> None:
    assert steps_to_suspension(CollapseDetector(healthy=usual), batch) <= 10


@pytest.mark.parametrize("batch", [1, 32])
def test_a_drafter_that_dies_after_long_health_is_suspended_as_fast(batch: int) -> None:
    detector = CollapseDetector(healthy=0.9)
    for number, log in enumerate(outcomes(batch, np.full(2000, 0.85), 0)):
        detector.observe(number, log)
    assert not detector.suspended
    assert steps_to_suspension(detector, batch, 2000) <= 10


def test_one_step_of_a_large_batch_is_not_enough() -> None:
    # its samples may share a cause
    detector = CollapseDetector(healthy=0.9)
    detector.observe(1, first_nodes(np.zeros(64, dtype=bool)))
    assert not detector.suspended
    assert detector.take_alarm() is None


def test_the_alarm_is_raised_once_with_the_drafters_age_and_what_was_seen() -> None:
    detector = CollapseDetector(healthy=0.9)
    detector.new_drafter(100)
    for number in range(101, 121):
        detector.observe(number, first_nodes(np.ones(1, dtype=bool)))
    assert detector.take_alarm() is None and not detector.why
    noticed = 120 + steps_to_suspension(detector, 2, start=120)
    alarm = detector.take_alarm()
    assert alarm is not None
    assert alarm.decode_step == noticed
    assert alarm.drafter_age_steps == noticed - 100
    assert alarm.observed < 0.45 < 0.85 < alarm.usual < 0.95
    assert f"{alarm.observed:.2f}" in detector.why and f"{alarm.usual:.2f}" in detector.why
    assert detector.take_alarm() is None
    # probes that go on failing raise no other
    for number in range(50):
        detector.observe(noticed + number, first_nodes(DEAD))
    assert detector.suspended
    assert detector.take_alarm() is None


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_drafter_raises_no_alarm_in_five_thousand_steps(batch: int, seed: int) -> None:
    # Wald: an excursion reaches 5 with probability e^(-5 t), 0.9 * (2/13)^t + 0.1 * (0.91/0.415)^t = 1 at t = 2.9:
    # 5e-7 each, and a step in ten starts one
    detector = CollapseDetector(healthy=0.9)
    for number, log in enumerate(outcomes(batch, np.full(5000, 0.9), seed)):
        detector.observe(number, log)
        assert not detector.suspended
    assert detector.take_alarm() is None


def runs_with_an_alarm(batch: int, *, acceptance: float) -> int:
    """Of twenty runs of a hundred decode steps, with a drafter that is usually accepted in nine tenths."""
    alarms = 0
    for seed in range(20):
        detector = CollapseDetector(healthy=0.9)
        for number, log in enumerate(outcomes(batch, np.full(100, acceptance), seed)):
            detector.observe(number, log)
        alarms += detector.take_alarm() is not None
    return alarms


@pytest.mark.parametrize("batch", [1, 32])
def test_two_thirds_of_the_usual_acceptance_is_seldom_taken_for_a_collapse(batch: int) -> None:
    # at the edge of healthy t is 1: e^-5 an excursion, before the usual acceptance has followed
    assert runs_with_an_alarm(batch, acceptance=0.585) <= 4


@pytest.mark.parametrize("batch", [1, 8])
def test_half_the_usual_acceptance_is_seldom_taken_for_a_collapse(batch: int) -> None:
    assert runs_with_an_alarm(batch, acceptance=0.45) <= 12


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("seed", range(3))
def test_slow_drift_is_followed_and_raises_no_alarm(batch: int, seed: int) -> None:
    detector = CollapseDetector(healthy=0.95)
    for number, log in enumerate(outcomes(batch, np.linspace(0.95, 0.6, 5000), seed)):
        detector.observe(number, log)
        assert not detector.suspended
    # a fall within hundreds of steps is not drift
    assert steps_to_suspension(detector, batch) <= 15


@pytest.mark.parametrize("batch", [1, 8])
def test_accepted_probes_resume_drafting_and_failed_ones_do_not(batch: int) -> None:
    detector = CollapseDetector(healthy=0.9)
    steps_to_suspension(detector, batch)
    for number in range(200):
        detector.observe(100 + number, first_nodes(np.zeros(batch, dtype=bool)))
    assert detector.suspended
    good = 0
    while detector.suspended:
        detector.observe(300 + good, first_nodes(np.ones(batch, dtype=bool)))
        good += 1
    # as sure of health as it was of collapse: 5 / ln 6.5 accepted nodes, or two steps of a large batch
    assert good == (3 if batch == 1 else 2)
    assert detector.why == ""


def test_a_drafter_that_recovered_can_collapse_again_with_a_new_alarm() -> None:
    detector = CollapseDetector(healthy=0.9)
    steps_to_suspension(detector, 2)
    assert detector.take_alarm() is not None
    while detector.suspended:
        detector.observe(50, first_nodes(np.ones(1, dtype=bool)))
    assert detector.take_alarm() is None
    assert 2 <= steps_to_suspension(detector, 2, start=60) <= 10
    assert detector.take_alarm() is not None


def test_one_sample_alone_suspends_and_the_next_probe_raises_the_alarm() -> None:
    """It may be an odd one: the end of a rollout, say, of which the next batch knows nothing."""
    odd, broken = CollapseDetector(healthy=0.9), CollapseDetector(healthy=0.9)
    for detector in (odd, broken):
        for number in range(20):
            detector.observe(number, first_nodes(np.ones(8, dtype=bool)))
        assert steps_to_suspension(detector, 1, start=20) <= 10
        assert detector.take_alarm() is None and detector.why
    while odd.suspended:
        odd.observe(60, first_nodes(np.ones(8, dtype=bool)))
    assert odd.take_alarm() is None
    broken.observe(60, first_nodes(np.zeros(8, dtype=bool)))
    alarm = broken.take_alarm()
    assert alarm is not None and alarm.decode_step < 30
    # what was forgiven once counts for nothing later
    assert steps_to_suspension(odd, 8, start=70) <= 10
    assert odd.take_alarm() is not None


def test_a_new_drafter_gets_a_fresh_trial() -> None:
    detector = CollapseDetector(healthy=0.9)
    first = steps_to_suspension(detector, 2)
    detector.take_alarm()
    detector.new_drafter(40)
    assert not detector.suspended and detector.why == ""
    assert steps_to_suspension(detector, 2, start=40) == pytest.approx(first, abs=1)
    alarm = detector.take_alarm()
    assert alarm is not None
    assert alarm.drafter_age_steps == alarm.decode_step - 40


def test_unverified_first_nodes_count_by_their_estimate() -> None:
    trusted, doubted = CollapseDetector(healthy=0.9), CollapseDetector(healthy=0.9)
    for number in range(10):
        trusted.observe(number, draft_log([[0.95, 0.9]], [0], [0]))
        doubted.observe(number, draft_log([[0.02, 0.01]], [0], [0]))
    assert not trusted.suspended
    assert doubted.suspended


def test_a_tree_counts_as_accepted_if_any_first_level_child_is() -> None:
    detector = CollapseDetector(healthy=0.9)
    for number in range(30):
        detector.observe(number, draft_log([[0.5, 0.4, 0.2, 0.2]], [3], [1], level_sizes=(2, 2)))
    assert not detector.suspended


def test_nan_estimates_count_as_rejected() -> None:
    detector = CollapseDetector(healthy=0.9)
    for number in range(10):
        detector.observe(number, draft_log([[np.nan, np.nan]], [0], [0]))
    assert detector.suspended
    assert np.isfinite(detector.take_alarm().observed)  # type: ignore[union-attr]


def test_a_drafter_below_the_lowest_usual_acceptance_is_not_suspended() -> None:
    detector = CollapseDetector(healthy=LOWEST_USUAL - 0.01)
    for number in range(100):
        detector.observe(number, first_nodes(DEAD))
    assert not detector.suspended
    assert detector.take_alarm() is None
