"""Every part of the rewards has its mean among the figures; the figures' own names are kept."""

import pytest

from rlhfspec.cluster.observe.iteration_metrics import reward_metrics
from rlhfspec.core.records import Reward


def test_parts_are_means_over_the_samples_that_have_them() -> None:
    rewards = [
        Reward(value=1.0, parts={"a": 1.0, "a/correct": 1.0}),
        Reward(value=3.0, parts={"a": 0.0, "b": 5.0, "a/correct": 0.0}),
    ]
    assert reward_metrics(rewards) == {
        "reward/mean": 2.0,
        "reward/std": 1.0,
        "reward/accuracy": 0.5,
        "reward/a": 0.5,
        "reward/a/correct": 0.5,
        "reward/b": 5.0,
    }


@pytest.mark.parametrize("name", ["mean", "std"])
def test_a_part_never_hides_a_figure(name: str) -> None:
    assert reward_metrics([Reward(value=1.0, parts={name: 9.0})]) == {"reward/mean": 1.0, "reward/std": 0.0}
