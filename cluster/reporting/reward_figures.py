"""The figures of an iteration's rewards: mean, spread, accuracy, the mean of every part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhfspec.core.records import Reward

_CORRECT = "correct"


def reward_figures(rewards: Sequence[Reward]) -> dict[str, float]:
    """`reward/mean`, `reward/std`, and `reward/PART` for every part that a sample has.

    A part's mean is over the samples that have it. `reward/accuracy` is that of the first part called `correct`. A
    part that is called as one of these figures gives way to it.
    """
    values = np.array([reward.value for reward in rewards])
    by_part: dict[str, list[float]] = {}
    for reward in rewards:
        for name, value in reward.parts.items():
            by_part.setdefault(name, []).append(value)
    figures = {"reward/mean": float(values.mean()), "reward/std": float(values.std())}
    correct = next((part for name, part in by_part.items() if name.split("/")[-1] == _CORRECT), None)
    if correct is not None:
        figures["reward/accuracy"] = float(np.mean(correct))
    return {f"reward/{name}": float(np.mean(part)) for name, part in by_part.items()} | figures
