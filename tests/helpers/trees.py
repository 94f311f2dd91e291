"""Sequences that begin alike at random, and the gradients that a learner computes of them."""

import numpy as np
import pytest
import torch
from torch import nn

from rlhfspec.core.records import Rollout, UpdateReport
from rlhfspec.learning.training.learner import Learner
from rlhfspec.learning.training.objectives.policy import PolicyBatch


def random_tree(seed: int) -> list[np.ndarray]:
    """One to seven sequences; each goes on from some place of an earlier one, or from nothing."""
    rng = np.random.default_rng(seed)
    found: list[np.ndarray] = []
    for _ in range(int(rng.integers(1, 8))):
        begin = (
            found[rng.integers(len(found))] if found and rng.random() < 0.8 else np.zeros(0, dtype=np.int64)
        )
        kept = begin[: int(rng.integers(len(begin) + 1))]
        found.append(np.append(kept, rng.integers(2, 5, size=int(rng.integers(0 if len(kept) else 1, 9)))))
    return found


def prefixes(sequences: list[np.ndarray]) -> set[tuple[int, ...]]:
    return {tuple(one[: stop + 1].tolist()) for one in sequences for stop in range(len(one))}


def doubled(learner: Learner) -> Learner:
    """All in float64, norms too: a rounding to float32 on the way would be all that is compared."""
    for model in filter(None, (learner.model, learner.reference)):
        for path, module in list(model.named_modules()):
            if "norm" in path and not list(module.children()):
                norm = nn.RMSNorm(len(module.weight), eps=1e-6)
                norm.weight = module.weight
                model.set_submodule(path, norm)
        model.double()
    return learner


def gradients(
    learner: Learner, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[torch.Tensor], UpdateReport, int]:
    """The losses and gradients of all minibatches, the report, and how many tokens went into forwards."""
    found: list[torch.Tensor] = []
    num_tokens = 0

    def keep(norm: float, when: str) -> float:
        found.extend(one.grad.clone() for one in learner._learned() if one.grad is not None)
        learner.optimizer.zero_grad()
        return norm

    problem = PolicyBatch.problem

    def keep_loss(batch: PolicyBatch, losses: list[float]) -> str | None:
        found.extend([torch.tensor([sum(losses)], dtype=torch.float64)] if losses else ())
        return problem(batch, losses)

    def count(module: nn.Module, args: tuple, inputs: dict) -> None:
        nonlocal num_tokens
        num_tokens += inputs["input_ids"].numel()

    # gradients as they are, not clipped
    monkeypatch.setattr(learner, "_clip", lambda losses: [*map(float, losses), 1.0])
    monkeypatch.setattr(learner, "_step", keep)
    monkeypatch.setattr(PolicyBatch, "problem", keep_loss)
    handle = learner.model.register_forward_pre_hook(count, with_kwargs=True)
    report = learner.update(rollouts)
    handle.remove()
    monkeypatch.setattr(PolicyBatch, "problem", problem)
    return found, report, num_tokens
