"""One model that learns from given items: packed forwards, accumulation, schedule, adapters, one trainer or several.

Equal items give equal parameters on the CPU, by any number of trainers up to the order of additions.
Source of the schedules: Loshchilov and Hutter 2017, 'SGDR' (cosine), as transformers.get_scheduler has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from core.errors import NotFiniteError
from core.settings.supervised import SupervisedTrainerConfig
from learning.adapter import Adapter
from learning.forward.batching import shared_packs
from learning.forward.precision import hold_linears_in, require_master_weights
from learning.forward.training_forward import prepare_for_training
from learning.parallel.learner_state import LearnerState
from learning.parallel.one_trainer import OneTrainer
from learning.schedule import adam, step_rule
from learning.supervised.objectives import ForwardSettings, Objective
from learning.trained_model import TrainedModel


class SupervisedLearner(TrainedModel):
    """Holds a model and its optimizer; `num_steps` have been taken."""

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
        """Prepare a model of float32 weights, on the device it is to learn on; with shards on the CPU.

        `head` names a module that learns whole beside adapters. `trainers` is the group that learns together, each
        with an equal model and equal batches. Raises ConfigError as `learning.adapter.Adapter`.
        """
        self.model, self.objective, self.trainer, self.seed = model, objective, trainer, seed
        self.trainers = trainers or OneTrainer()
        self.num_steps = 0
        self._forward = ForwardSettings(compute_dtype=compute_dtype, keeps_casts=not self.trainers.is_sharded)
        prepare_for_training(model, gradient_checkpointing=trainer.gradient_checkpointing)
        self.adapter: Adapter | None = None
        if trainer.lora is not None:
            hold_linears_in(model, compute_dtype)
            if head is not None:
                model.get_submodule(head).float()
            self.adapter = Adapter(model, trainer.lora, seed=seed, head=head)
        require_master_weights(model)
        self.trainers.shard(model)
        self.optimizer = adam(self._learned(), trainer)
        self._rule = step_rule(trainer.schedule, trainer.warmup_steps, total_steps)

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
        rate = self.trainer.learning_rate * self._rule(self.num_steps + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = self.trainers.clip(self._learned(), self.trainer.max_grad_norm)
        if not math.isfinite(norm):
            raise NotFiniteError(
                f"the gradient norm of step {self.num_steps + 1} is {norm}; expected a finite number; lower "
                "trainer.learning_rate"
            )
        if norm > 0.0:
            # else momentum and decay alone would move the weights
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return means | {"learning_rate": rate, "grad_norm": norm}

    @torch.no_grad()
    def evaluate(self, items: Sequence[Any]) -> dict[str, float]:
        """Means over held-out items. Collective."""
        return self._means(items, with_gradient=False)

    def save(self, folder: Path) -> None:
        """Write everything that is needed to go on (`LearnerState`). Collective."""
        self._state().save(folder)

    def load(self, folder: Path) -> None:
        """Go on where `save` was called, with any number of trainers. Raises ConfigError when it does not fit."""
        state = self._state()
        state.load(folder)
        self.num_steps = state.num_optimizer_steps

    def _state(self) -> LearnerState:
        return LearnerState(
            model=self.model,
            optimizer=self.optimizer,
            reference=None,
            critic=None,
            weight_version=self.num_steps,
            num_optimizer_steps=self.num_steps,
            seed=self.seed,
            trainers=self.trainers,
        )

    def _means(self, items: Sequence[Any], *, with_gradient: bool) -> dict[str, float]:
        total = sum(self.objective.weight(item) for item in items)
        sums: dict[str, Tensor] = {}
        for pack, is_filler in self._packs(items):
            found = self.objective.sums(self.model, pack, self._forward)
            share = 0.0 if is_filler else 1.0 / total
            if with_gradient:
                (found["loss"] * share).backward()
            for name, value in found.items():
                part = value.detach().float().cpu() * share
                sums[name] = sums[name] + part if name in sums else part
        names = sorted(sums)
        whole = self.trainers.sum(torch.stack([sums[name] for name in names]))
        return dict(zip(names, whole.tolist(), strict=True))

    def _packs(self, items: Sequence[Any]) -> Iterator[tuple[list[Any], bool]]:
        """This trainer's share in packs, and whether one is computed for nothing, because another trainer has more."""
        lengths = [item.num_tokens for item in items]
        mine, num_fillers = shared_packs(
            lengths,
            self.trainer.max_tokens_per_forward,
            rank=self.trainers.rank,
            num_shares=self.trainers.size,
        )
        for pack in mine:
            yield [items[i] for i in pack], False
        shortest = min(range(len(items)), key=lambda i: (lengths[i], i))
        for _ in range(num_fillers):
            yield [items[shortest]], True
