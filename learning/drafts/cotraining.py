"""The draft model learns within the target's own update, from the logits of the very same training forward.

L = L_policy + lambda L_draft with L_draft = KL(target || draft) at the response tokens, the target's logits held
constant: no gradient reaches the target, and no second forward of it is computed. The two share no parameter, so the
sum is minimised by an optimizer of each, and the target's steps are, to the bit, those without a draft model. For Adam
a factor of a loss is none of the step: what lambda would say, the draft's learning rate says.

A refit (`learning.drafts.refit`) learns afterwards, on the same rollouts, for as long as its budget allows; here
the draft takes one step with each of the target's, its version is published with the target's, and there is no budget.
No slice is held out: a minibatch's divergence is measured before it is learned from.

Source: NeMo-RL, 'Accelerating RL with speculative decoding' (arXiv 2604.26779); Zhou et al. 2024, 'DistillSpec'
(forward KL on the policy's own responses).
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.errors import NotFiniteError
from ...engine.decoding.logprobs import scaled_logits
from ...engine.weights.causal_lm import PreTrainedModel
from ...engine.weights.shared_ids import foreign_of, without
from ..training.objectives.policy import SeenLogits
from ..training.parallel import OneTrainer
from ..training.trainer_core import backward
from ..training.training_forward import response_logits
from .draft_learner import DraftLearner, DraftTerms, RefitReport
from .soft_targets import whole_kl


class DraftCotrainer(DraftLearner):
    """One of a `Learner`'s observers (`learning.training.objectives.policy.LogitsObserver`).

    Of several trainers each has the whole draft model, computes it at its own rows, and takes the same steps.
    """

    def __init__(
        self, model: PreTrainedModel, terms: DraftTerms, *, trainers: OneTrainer | None = None
    ) -> None:
        super().__init__(model, terms)
        self._trainers = trainers or OneTrainer()
        self._last: RefitReport | None = None
        self.begin()

    def begin(self) -> None:
        """A new update begins."""
        self._remember()
        self._divergences: list[float] = []
        self._num_tokens = 0
        self._spent_s = 0.0
        self._is_broken = False
        self._forget_minibatch()

    def observe(self, seen: SeenLogits) -> None:
        """Add the gradient of some rows to the minibatch's."""
        if self._is_broken:
            return
        began_s = time.perf_counter()
        terms = self._terms
        logits, _ = response_logits(
            self.model, seen.packed, terms.vocab_size, compute_dtype=terms.compute_dtype
        )
        # of what both have: the target's share of the draft's missing tokens is nothing to learn
        foreign = foreign_of(self.model.config, terms.vocab_size)
        student = without(scaled_logits(logits, terms.temperature), foreign)
        divergence = whole_kl(without(seen.scaled, foreign), student)
        total = divergence.sum()
        backward(total)
        self._open.append(total.detach())
        self._open_tokens += len(divergence)
        self._spent_s += time.perf_counter() - began_s

    def step(self) -> None:
        """End a minibatch: one optimizer step on the mean over all trainers' tokens. Collective.

        What is not finite is not stepped with, and the update's steps are given up at its end.
        """
        began_s = time.perf_counter()
        sums = torch.zeros(2, dtype=torch.float64)
        if self._open:
            sums[0], sums[1] = torch.stack(self._open).sum(), self._open_tokens
        total, num_tokens = self._trainers.sum(sums).tolist()
        self._is_broken = self._is_broken or not math.isfinite(total)
        if num_tokens and not self._is_broken:
            parameters = list(self.model.parameters())
            self._trainers.sum_whole(parameters)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= num_tokens
            try:
                self._trainer.take_step("of a draft model")
            except NotFiniteError:
                self._is_broken = True
            self._divergences.append(total / num_tokens)
            self._num_tokens += int(num_tokens)
        self._forget_minibatch()
        self._spent_s += time.perf_counter() - began_s

    def end(self, trainers: OneTrainer) -> dict[str, float]:
        """End the update; its metrics. The version grows where steps were taken and all is finite."""
        is_finite = not self._is_broken and self._is_finite()
        if not is_finite:
            self._give_up()
        elif self._divergences:
            self._take()
        self._last = RefitReport(
            outcome="not_finite" if not is_finite else "taken" if self._divergences else "no_time",
            weight_version=self.weight_version,
            num_steps=len(self._divergences),
            num_tokens=self._num_tokens,
        )
        metrics = {"draft/cotrain_s": self._spent_s}
        if self._divergences:
            metrics["draft/cotrain_kl"] = sum(self._divergences) / len(self._divergences)
        return metrics

    def refit(self, *_: Any, **__: Any) -> RefitReport:
        """What the last update did with the draft model, asked for as a refit is (`DraftRefitter.refit`); once."""
        last, self._last = self._last, None
        return last or RefitReport(outcome="no_time", weight_version=self.weight_version)

    def save(self, path: Path) -> None:
        """See `DraftLearner`; of several trainers the first writes."""
        if self._trainers.rank == 0:
            super().save(path)

    def load(self, path: Path) -> None:
        """See `DraftLearner`."""
        super().load(path)
        self.begin()

    def _forget_minibatch(self) -> None:
        self._open: list[Tensor] = []
        self._open_tokens = 0
        self.model.zero_grad(set_to_none=True)
