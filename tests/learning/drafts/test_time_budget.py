"""Time budgets: work is expected to cost what such work has cost, and no refusal is for ever."""

import pytest

from rlhfspec.learning.drafts.refit import TimeBudget, WorkCosts


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def test_work_is_expected_to_cost_what_the_dearest_of_the_last_eight_did():
    clock = Clock()
    costs = WorkCosts(clock)
    assert costs.expected_s("step", 10) is None
    for seconds in (9.0, 2.0, *[1.0] * 7):
        with costs.timed("step", 4):
            clock.now_s += seconds
    assert costs.expected_s("step", 10) == pytest.approx(2.0 / 4 * 10)
    assert costs.expected_s("another kind", 10) is None


def test_a_refusal_makes_the_next_one_less_likely():
    clock = Clock()
    costs = WorkCosts(clock)
    with costs.timed("step", 1):
        clock.now_s += 10.0
    for _ in range(30):
        costs.relieve()
    assert 0.0 < costs.expected_s("step", 1) < 1.0


def test_a_budget_admits_what_ends_in_time():
    clock = Clock()
    budget = TimeBudget(3.0, clock)
    clock.now_s += 1.0
    assert budget.admits(2.0) and not budget.admits(2.01)
    clock.now_s += 2.5
    assert not budget.admits(0.0) and budget.spent_s == pytest.approx(3.5)
