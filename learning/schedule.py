"""How the learning rate moves over a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from core.config import TrainerConfig
from core.errors import ConfigError


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
    name = "constant_with_warmup" if trainer.schedule == "constant" else trainer.schedule
    warmup = trainer.warmup_steps
    # of the scheduler only its function of the step is taken: it would set the rates of this optimizer
    scheduler: LambdaLR = get_scheduler(  # type: ignore[assignment]
        name,
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0),
        num_warmup_steps=warmup,
        num_training_steps=horizon.num_optimizer_steps,
    )
    of_step = scheduler.lr_lambdas[0]
    # transformers counts from 0, where a warm-up has no rate yet and would waste the step
    return lambda step: step / warmup if step <= warmup else float(of_step(step - 1))
