"""Learning-rate schedules: what the rate is multiplied by at a step, as transformers.get_scheduler has it.

Source: Loshchilov and Hutter 2017, 'SGDR' (cosine).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import get_scheduler

from ...core.config import TrainerConfig
from ...core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """How far a run goes; None: not known."""

    num_optimizer_steps: int | None = None
    max_new_tokens: int | None = None
    "in one response"


def rate_factor(trainer: TrainerConfig, horizon: Horizon) -> Callable[[int], float]:
    """What the learning rate is multiplied by at the n-th optimizer step, from 1: a pure function of n.

    Raises ConfigError for a schedule that falls towards an end that is not known.
    """
    if trainer.schedule != "constant" and horizon.num_optimizer_steps is None:
        raise ConfigError(
            f"trainer.schedule {trainer.schedule} falls towards the run's last step, and the learner was not told "
            "which that is; give it a Horizon with num_optimizer_steps, or take constant"
        )
    return step_rule(trainer.schedule, trainer.warmup_steps, horizon.num_optimizer_steps)


def step_rule(
    schedule: Literal["constant", "linear", "cosine"], warmup_steps: int, num_steps: int | None
) -> Callable[[int], float]:
    """What a rate is multiplied by at the n-th step, from 1: as transformers, with a warm-up of as many steps.

    transformers counts from 0, where a warm-up has no rate yet and would waste the step.
    """
    scheduler: Any = get_scheduler(
        "constant_with_warmup" if schedule == "constant" else schedule,
        # asked for its rule alone: a rate is a function of the step, so nothing of it is to be saved
        torch.optim.SGD([torch.zeros(1)], lr=1.0),
        num_warmup_steps=warmup_steps,
        num_training_steps=num_steps,
    )
    rule = scheduler.lr_lambdas[0]
    return lambda step: step / warmup_steps if step <= warmup_steps else float(rule(step - 1))
