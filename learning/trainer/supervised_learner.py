"""One model that learns from given items, a batch a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhfspec.core.settings.supervised import SupervisedTrainerConfig
from rlhfspec.learning.objectives.supervised_objectives import ForwardSettings, Objective
from rlhfspec.learning.trainer.batching import shared_packs
from rlhfspec.learning.trainer.parallel import OneTrainer
from rlhfspec.learning.trainer.trainer_core import Trainer, step_rule


class SupervisedLearner(Trainer):
    """Learns what an objective says of its items; a step is a weight version."""

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        trainer: SupervisedTrainerConfig,
        *,
        total_steps: int,
        seed: int,
        head: str | None = None,
        compute_dtype: torch.dtype = torch.float32,
        trainers: OneTrainer | None = None,
    ) -> None:
        """See `Trainer`; the schedule falls towards `total_steps`."""
        super().__init__(
            model,
            trainer,
            seed=seed,
            rate_factor=step_rule(trainer.schedule, trainer.warmup_steps, total_steps),
            compute_dtype=compute_dtype,
            trainers=trainers,
            head=head,
        )
        self.objective = objective
        self._max_tokens = trainer.max_tokens_per_forward
        self._forward = ForwardSettings(compute_dtype=compute_dtype, keeps_casts=not self.trainers.is_sharded)

    def step(self, items: Sequence[Any]) -> dict[str, float]:
        """Take one optimizer step on the mean over a batch; its means, learning rate and gradient norm. Collective.

        Raises NotFiniteError when loss or gradient is not finite: no step is taken then.
        """
        means = self._means(items, with_gradient=True)
        self.trainers.agree(
            None
            if math.isfinite(means["loss"])
            else f"the loss of step {self.num_steps + 1} is {means['loss']}; expected a finite number; lower "
            "trainer.learning_rate"
        )
        self.trainers.sum_gradients(self._learned())
        norm = self._take_step(f"of step {self.num_steps + 1}")
        self.weight_version = self.num_steps = self.num_steps + 1
        return means | {"learning_rate": self.rate_at(self.num_steps), "grad_norm": norm}

    @torch.no_grad()
    def evaluate(self, items: Sequence[Any]) -> dict[str, float]:
        """Means over held-out items. Collective."""
        return self._means(items, with_gradient=False)

    def _means(self, items: Sequence[Any], *, with_gradient: bool) -> dict[str, float]:
        total = sum(self.objective.weight(item) for item in items)
        sums: dict[str, Tensor] = {}
        for pack in shared_packs([item.num_tokens for item in items], self._max_tokens, self.trainers):
            found = self.objective.sums(self.model, [items[row] for row in pack.rows], self._forward)
            share = 0.0 if pack.is_filler else 1.0 / total
            if with_gradient:
                (found["loss"] * share).backward()
            for name, value in found.items():
                part = value.detach().float().cpu() * share
                sums[name] = sums[name] + part if name in sums else part
        names = sorted(sums)
        whole = self.trainers.sum(torch.stack([sums[name] for name in names]))
        return dict(zip(names, whole.tolist(), strict=True))
