"""What should come of every iteration, and did not: by made-up metrics (real ones: `test_planted_faults`)."""

from __future__ import annotations

import pytest

from rlhfspec.cluster.observe.outcome_checks import FIRST_LOG_RATIO, RATIO_OFF, UNCHANGED, Outcomes, faults
from rlhfspec.core.errors import NumericsError

GOOD = {UNCHANGED: 0.0, FIRST_LOG_RATIO: 1e-6, "reward/min": 0.0, "reward/max": 1.0}


def told(outcomes: Outcomes, *rows: dict[str, float]) -> list[list[str]]:
    return [list(outcomes.lines(i, outcomes.judged(GOOD | row))) for i, row in enumerate(rows)]


def test_responses_that_never_end_are_told_once_with_the_end_tokens() -> None:
    cut, some = {"rollout/length_cut_share": 1.0}, {"rollout/length_cut_share": 0.9}
    said = told(Outcomes(is_exact=True, ends="2 '</s>'"), cut, cut, some, cut, cut, cut, cut)
    assert [len(lines) for lines in said] == [0, 0, 0, 0, 0, 1, 0]
    assert "no response of 3 iterations ended; expected one of the end tokens 2 '</s>'" in said[5][0]


def test_a_reward_that_never_varies_is_told_after_the_first_iterations() -> None:
    equal = {"reward/min": 0.25, "reward/max": 0.25}
    said = told(Outcomes(is_exact=True), *[equal] * 7)
    assert [len(lines) for lines in said] == [0, 0, 0, 0, 1, 0, 0]
    assert "every reward of the 5 iterations so far is 0.25" in said[4][0]
    assert not any(told(Outcomes(is_exact=True), *[equal] * 4, GOOD, *[equal] * 5))
    assert not any(told(Outcomes(is_exact=True), *[equal | {"learner/distill_loss": 0.5}] * 7))


def test_versions_with_one_checksum_end_a_run_unless_one_differed_or_bfloat16_may_round_them_away() -> None:
    same = {UNCHANGED: 1.0}
    with pytest.raises(NumericsError, match="every version has one checksum"):
        told(Outcomes(is_exact=True), same)
    assert [len(lines) for lines in told(Outcomes(is_exact=True), GOOD, same, same)] == [0, 1, 1]
    rounding = Outcomes(is_exact=False)
    assert [len(lines) for lines in told(rounding, same, same, same, same)] == [1] * 4
    with pytest.raises(NumericsError, match="every version has one checksum"):
        told(rounding, same)


@pytest.mark.parametrize(
    ("is_exact", "gap", "is_off", "is_void"),
    [
        (True, 1e-4, False, False),
        (True, 1e-2, True, False),
        (True, 1.4, True, True),
        (False, 0.03, False, False),
        (False, 0.2, True, False),
        (False, 1.4, True, True),
    ],
)
def test_first_ratios_are_off_beyond_rounding_and_void_beyond_reason(
    is_exact: bool, gap: float, is_off: bool, is_void: bool
) -> None:
    row, outcomes = {FIRST_LOG_RATIO: gap}, Outcomes(is_exact=is_exact)
    judged = outcomes.judged(GOOD | row)
    assert judged[RATIO_OFF] == float(is_off)
    assert outcomes.judged(judged | {"mismatch/lag_max": 1.0})[RATIO_OFF] == 0.0, "stale samples may differ"
    lines = outcomes.lines(0, judged)
    assert bool(next(lines, "")) == is_off
    if is_void:
        with pytest.raises(NumericsError, match="instances do not decode what is trained"):
            next(lines)


def test_a_runs_faults_follow_from_its_metrics() -> None:
    same, off = {UNCHANGED: 1.0}, {RATIO_OFF: 1.0, FIRST_LOG_RATIO: 3.7}
    assert faults([GOOD, same]) == faults([{}]) == faults([]) == []
    assert faults([same, {}, same]) == [
        "every weight version has one checksum: nothing learned was published"
    ]
    assert faults([GOOD, off])[0].startswith("first ratios are off in 1 of 2 iterations, by up to 3.7 nats")
