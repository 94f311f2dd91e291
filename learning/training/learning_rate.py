"""Learning-rate schedules: what the rate is multiplied by at a step, as transformers.get_scheduler has it.

Sources: Loshchilov and Hutter 2017, 'SGDR' (cosine); Hu et al. 2024, 'MiniCPM', section 4 (warmup-stable-decay).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from ...core.config import TrainerConfig
from ...core.errors import ConfigError
from ...core.settings.supervised import SupervisedTrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """How far a run goes; None: not known."""

    num_optimizer_steps: int | None = None
    max_new_tokens: int | None = None
    "in one response"


def rate_factor(trainer: TrainerConfig, horizon: Horizon) -> Callable[[int], float]:
    """What the learning rate is multiplied by at the n-th optimizer step, from 1: a pure function of n.

    Raises ConfigError for a schedule, or a warm-up, that goes by an end that is not known.
    """
    is_even = trainer.schedule == "constant" and trainer.warmup_ratio == 0.0
    if not is_even and horizon.num_optimizer_steps is None:
        raise ConfigError(
            f"trainer.schedule {trainer.schedule} (warmup_ratio {trainer.warmup_ratio:g}) goes by the run's last step, "
            "and the learner was not told which that is; give it a Horizon with num_optimizer_steps, or take constant"
        )
    return step_rule(trainer, horizon.num_optimizer_steps)


def step_rule(
    trainer: TrainerConfig | SupervisedTrainerConfig, num_steps: int | None
) -> Callable[[int], float]:
    """What a rate is multiplied by at the n-th step, from 1: as transformers, with a warm-up of as many steps.

    transformers counts from 0, where a warm-up has no rate yet and would waste the step.
    """
    warmup = trainer.warmup_steps or math.ceil(trainer.warmup_ratio * (num_steps or 0))
    own: dict[str, Any] = {}
    if trainer.schedule == "cosine_with_min_lr":
        own = {"min_lr_rate": trainer.min_lr_ratio}
    elif trainer.schedule == "warmup_stable_decay":
        after = max((num_steps or 0) - warmup, 0)
        decay = min(math.ceil(trainer.decay_ratio * (num_steps or 0)), after)
        own = {"min_lr_ratio": trainer.min_lr_ratio, "num_decay_steps": decay}
    scheduler: Any = transformers.get_scheduler(
        "constant_with_warmup" if trainer.schedule == "constant" else trainer.schedule,
        # asked for its rule alone: a rate is a function of the step, so nothing of it is to be saved
        torch.optim.SGD([torch.zeros(1)], lr=1.0),
        num_warmup_steps=warmup,
        num_training_steps=num_steps,
        scheduler_specific_kwargs=own,
    )
    rule = scheduler.lr_lambdas[0]
    return lambda step: step / warmup if step <= warmup else float(rule(step - 1))
