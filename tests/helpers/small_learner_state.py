"""A trainer's state after one optimizer step, of a few numbers."""

import torch
from torch import nn

from rlhfspec.learning.training.learner_state import LearnerState


def small_learner_state(steps: int = 1) -> LearnerState:
    """The same weights and moments each time; `steps` is what its counters say."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return LearnerState(
        model=model,
        optimizer=optimizer,
        reference=None,
        critic=None,
        weight_version=steps,
        num_optimizer_steps=steps,
        seed=5,
    )
