"""The error tree decides the exit code."""

import pytest

from core import errors


@pytest.mark.parametrize(
    ("name", "exit_code"),
    [
        ("ConfigError", 2),
        ("ModelError", 2),
        ("DataError", 2),
        ("PlacementError", 2),
        ("RewardError", 2),
        ("WeightsError", 1),
        ("NumericsError", 1),
        ("InstanceLost", 1),
        ("SchedulerLost", 1),
    ],
)
def test_only_bad_input_exits_with_2(name: str, exit_code: int) -> None:
    assert vars(errors)[name].exit_code == exit_code


def test_a_wait_that_ran_out_names_both_sides() -> None:
    error = errors.WaitTimeout(
        waiter="driver", waited_for="gen-1", order="load_weights v3", waited_s=12.5, advice="look at its log"
    )
    for part in ("driver", "gen-1", "load_weights v3", "12", "look at its log"):
        assert part in str(error)
