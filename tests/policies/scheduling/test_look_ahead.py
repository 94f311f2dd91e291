"""The law of look-ahead: what it fills, what it leaves alone, what it learns. No Ray here."""

import numpy as np
import pytest
from hand_profile import hand_cost, hand_profile

from rlhfspec.policies.reallocation.rate_curve import RateCurve, rate_curve_from_profile
from rlhfspec.policies.scheduling.look_ahead import (
    PRIOR,
    ROWS_A_TOKEN,
    LookAheadLaw,
    rows_of_curve,
    rows_of_profile,
)

FLAT = RateCurve([1, 8, 32], [n / 7.1e-3 for n in (1, 8, 32)])
"An H100's plain step of the 8B shape: 7.1 ms at 1, 8 and 32 samples."
SMOLLM2 = RateCurve([1, 8, 16], [1910 / seconds for seconds in (68.4, 15.3, 14.7)])
"A core, decoding 1,910 tokens: from 8 samples on it is busy with rows."
SMOLLM2_ROWS = np.interp(np.arange(1, 17), [1, 8, 16], [14.4, 14.2, 13.7]) / 1910 / ROWS_A_TOKEN
"Proving the same with chains of 16."


def law(curve: RateCurve, **how) -> LookAheadLaw:
    return LookAheadLaw(curve, rows_of_curve(curve, 32), **how)


def asked(one: LookAheadLaw, running: int, free: int, *, batch: int = 32, **when) -> int:
    return one.num_attempts(num_running=running, num_free=free, batch=batch, **when)


def test_where_a_step_waits_for_memory_every_slot_is_filled_but_not_beside_a_trainer_on_the_processor():
    flat = law(FLAT)
    assert [asked(flat, running, 32 - running) for running in (0, 1, 31, 32)] == [32, 31, 1, 0]
    shared = law(FLAT, is_shared=True)
    # 0.8 x 32 x 7.1 / 32 ms are less than the step; beside samples and beside other instances it costs nothing
    assert asked(shared, 0, 32, is_learning=True) == 0
    assert asked(shared, 0, 32) == 32 and asked(shared, 3, 29) == 29


def test_where_rows_are_what_a_step_costs_nothing_is_attempted_at_any_batch_from_eight_on():
    busy = LookAheadLaw(SMOLLM2, SMOLLM2_ROWS)
    assert {asked(busy, running, 8, batch=batch) for running in (0, 1, 8) for batch in (8, 16)} == {0}
    assert "no attempts" in busy.why() and "16 samples at once" in busy.why()
    # one sample at a time it is proved in a fifth of the time
    assert asked(busy, 0, 1, batch=1) == 1


def test_between_the_two_as_many_as_their_rows_are_worth():
    """Flat up to eight samples, then 1 ms each: p s = 0.8 x (32 / 32 - 0) ms do not pay a row, 0 ms do."""
    knee = LookAheadLaw(
        RateCurve([1, 8, 32], [n / s for n, s in ((1, 8e-3), (8, 8e-3), (32, 32e-3))]), np.zeros(32)
    )
    assert [asked(knee, running, 32 - running) for running in (1, 6, 8, 20)] == [7, 2, 0, 0]


def test_a_profile_says_the_same_of_its_costs():
    flat = hand_profile(0.7, hand_cost(forward_ms=7.0, token_ms=1e-3, knee_ms=0.0))
    busy = hand_profile(0.7, hand_cost(forward_ms=0.1, token_ms=4.0, knee_ms=0.0))
    for profile, expected in ((flat, 24), (busy, 0)):
        rows = rows_of_profile(profile)
        assert len(rows) == profile.max_samples and (rows > 0).all()
        one = LookAheadLaw(rate_curve_from_profile(profile, speculation=False), rows)
        assert asked(one, 8, 24) == expected


def test_a_number_is_taken_whatever_the_law_says():
    forced = LookAheadLaw(SMOLLM2, SMOLLM2_ROWS, most=3)
    assert [asked(forced, 8, free, batch=8) for free in (8, 3, 1, 0, -1)] == [3, 3, 1, 0, 0]
    assert "up to 3 attempts" in forced.why()


def test_beside_samples_most_must_be_proved_and_an_idle_instance_asks_for_less():
    flat = law(FLAT)
    for _ in range(2):
        flat.observe(100, 10)
        flat.next_batch()
    assert 0.4 < flat.agreement < 0.5 and asked(flat, 1, 31) == 0 and asked(flat, 0, 32) == 32


def test_agreement_falls_with_what_is_measured_ends_attempts_and_comes_back_by_itself():
    # four samples more cost 0.28 ms, and save 4 p x 0.23
    one = LookAheadLaw(RateCurve([1, 32], [1 / 5e-3, 32 / 7.2e-3]), np.zeros(32))
    assert asked(one, 4, 28) == 28 and one.agreement == PRIOR
    for _ in range(6):
        one.observe(1000, 50)
        one.next_batch()
    assert one.agreement == pytest.approx(0.05, abs=0.1) and asked(one, 4, 28) == 0
    low = one.agreement
    one.next_batch()
    assert low < one.agreement < low + 0.1
    for _ in range(60):
        one.next_batch()
    assert one.agreement == pytest.approx(PRIOR, abs=0.05) and asked(one, 4, 28) == 28
    one.observe(1000, 1000)
    one.next_batch()
    assert one.agreement > 0.8 and f"{one.agreement:.2f} of attempted tokens" in one.why()
