"""Learning rates by the optimizer step."""

import pytest
import torch
from pydantic import ValidationError
from transformers import get_scheduler

from rlhfspec.core.config import TrainerConfig
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings.supervised import SupervisedTrainerConfig
from rlhfspec.learning.training.learning_rate import Horizon, rate_factor, step_rule


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


@pytest.mark.parametrize("section", [TrainerConfig, SupervisedTrainerConfig])
@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        ({"schedule": "cosine_with_min_lr", "min_lr_ratio": 0.1}, {"min_lr_rate": 0.1}),
        ({"schedule": "warmup_stable_decay", "decay_ratio": 0.3}, {"num_decay_steps": 6}),
        (
            {"schedule": "warmup_stable_decay", "min_lr_ratio": 0.2},
            {"num_decay_steps": 2, "min_lr_ratio": 0.2},
        ),
    ],
)
def test_a_floor_and_a_late_decay_are_those_of_transformers(section, settings, theirs):
    rule = step_rule(section(warmup_ratio=0.24, **settings), 20)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = get_scheduler(settings["schedule"], optimizer, 5, 20, scheduler_specific_kwargs=theirs)
    # five steps of warm-up: a quarter of twenty, rounded up; theirs begin a step later
    assert [rule(step) for step in range(1, 6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert [rule(step) for step in range(6, 21)] == pytest.approx(
        [scheduler.lr_lambdas[0](step) for step in range(5, 20)]
    )
    assert rule(20) < 0.7


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"warmup_steps": 2, "warmup_ratio": 0.1}, "take one out"),
        ({"min_lr_ratio": 0.1}, "min_lr_ratio is 0.1 with schedule constant"),
        ({"schedule": "cosine_with_min_lr"}, "min_lr_ratio is 0.0"),
        ({"schedule": "cosine", "decay_ratio": 0.2}, "decay_ratio 0.2 is of"),
        ({"schedule": "warmup_stable_decay", "warmup_ratio": 0.6, "decay_ratio": 0.6}, "more than the whole"),
    ],
)
def test_keys_of_another_schedule_are_refused(settings, said):
    for section in (TrainerConfig, SupervisedTrainerConfig):
        with pytest.raises(ValidationError, match=said):
            section(**{"schedule": "constant"} | settings)


def test_a_share_of_an_unknown_length_is_refused():
    with pytest.raises(ConfigError, match=r"warmup_ratio 0\.1"):
        rate_factor(TrainerConfig(warmup_ratio=0.1), Horizon())
