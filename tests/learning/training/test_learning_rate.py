"""Learning rates by the optimizer step."""

import pytest

from rlhfspec.core.config import TrainerConfig
from rlhfspec.core.errors import ConfigError
from rlhfspec.learning.training.learning_rate import Horizon, rate_factor


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # ten steps, two of them warming up: 1/2, 1, then what is left of eight steps
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
    ],
)
def test_the_rate_warms_up_and_falls(schedule, expected):
    factor = rate_factor(TrainerConfig(schedule=schedule, warmup_steps=2), Horizon(num_optimizer_steps=10))
    assert [factor(step) for step in range(1, 11)] == pytest.approx(expected)


def test_cosine_falls_from_one_towards_zero():
    factor = rate_factor(TrainerConfig(schedule="cosine"), Horizon(num_optimizer_steps=4))
    # (1 + cos(pi n / 4)) / 2
    assert [factor(step) for step in (1, 2, 3, 4)] == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)


def test_no_step_is_wasted():
    for schedule in ("constant", "linear", "cosine"):
        factor = rate_factor(TrainerConfig(schedule=schedule), Horizon(num_optimizer_steps=5))
        assert factor(1) == 1.0 and factor(5) > 0.0


def test_a_falling_schedule_needs_an_end():
    with pytest.raises(ConfigError, match=r"trainer\.schedule linear"):
        rate_factor(TrainerConfig(schedule="linear"), Horizon())
