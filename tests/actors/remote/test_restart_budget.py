"""Restarts within an hour are bounded; what is longer ago is forgotten."""

from rlhfspec.actors.remote.restart_budget import WINDOW_S, RestartBudget


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_separate_losses_of_a_long_run_never_use_it_up():
    clock = Clock()
    budget = RestartBudget(1, clock=clock)
    for _ in range(50):
        assert budget.spend() and budget.num_spent == 1
        clock.now_s += WINDOW_S
    assert budget.num_spent == 0


def test_losses_one_after_the_other_use_it_up_until_the_oldest_is_an_hour_ago():
    clock = Clock()
    budget = RestartBudget(3, clock=clock)
    for _ in range(3):
        assert budget.spend()
        clock.now_s += 600.0
    assert not budget.spend() and budget.num_spent == 3
    clock.now_s += WINDOW_S - 1800.0 - 1.0
    assert not budget.spend(), "a second too early"
    clock.now_s += 1.0
    assert budget.spend() and budget.num_spent == 3
    assert not budget.spend(), "the second loss still counts"


def test_none_are_allowed_where_the_config_says_so():
    assert not RestartBudget(0, clock=Clock()).spend()
