"""Refits the draft model on an iteration's rollouts, within a budget of seconds.

The draft learns to put its probability where the target does, at the response positions that the rollouts
have just visited: KL(target || draft), from the likeliest tokens that the update set aside, else from the
sampled tokens alone. A slice of the rollouts is held out; weights that do worse on it than the old ones
are given up, and the next refit learns at half the rate (a taken one raises it again, up to the
configured one), so a rate that is too high costs some refits and not the run.

No token depends on the draft model, so how many steps fit into the budget may depend on the clock.

Source: Zhou et al. 2024, 'DistillSpec' (on-policy data, forward KL); Kim and Rush 2016, 'Sequence-level
knowledge distillation', section 3.2 (sampled sequences as targets).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhfspec.core.config import DrafterTrainingConfig
from rlhfspec.core.records import Rollout
from rlhfspec.engine.weights.chunks import not_finite, unique_tensors
from rlhfspec.learning.drafts.distillation_batch import DistillationBatches, distillation_batches
from rlhfspec.learning.drafts.draft_state import no_draft_state, read_draft_state, write_draft_state
from rlhfspec.learning.drafts.soft_targets import SoftTargetStore
from rlhfspec.learning.drafts.time_budget import TimeBudget, WorkCosts
from rlhfspec.learning.trainer.next_token import SupervisedTrainer
from rlhfspec.learning.trainer.training_forward import prepare_for_training

WARMUP_STEPS = 10
RATE_AFTER_FAILURE = 0.5
RATE_AFTER_SUCCESS = 1.5
LEARN_OVER_EVALUATE = 4.0
"A step's cost over an evaluation's, before any step has been timed."

Outcome = Literal["taken", "worse", "not_finite", "no_time", "one_sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitReport:
    """What one refit did. Only the outcome `taken` changes weights and version."""

    outcome: Outcome
    weight_version: int
    "of the draft model, afterwards"
    num_steps: int
    num_tokens: int
    "response tokens learned from, repeated ones each time"
    kl_before: float | None
    "KL(target || draft) on the held-out slice, nats a token; None when not computed or not finite"
    kl_after: float | None
    "of the weights that were tried, taken or not"
    refit_s: float


class DraftRefitter:
    """Holds the draft model and its optimizer from one refit to the next."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        settings: DrafterTrainingConfig,
        temperature: float,
        seed: int,
        pad_token_id: int,
        vocab_size: int,
        weight_version: int = 0,
        compute_dtype: torch.dtype = torch.float32,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.weight_version = weight_version
        self._settings = settings
        self._temperature = temperature
        self._pad_token_id = pad_token_id
        self._vocab_size = vocab_size
        self._compute_dtype = compute_dtype
        self._clock = clock
        self._costs = WorkCosts(clock)
        self._rng = np.random.default_rng([seed, 0xD4AF])
        self._rate_scale = 1.0
        self._trainer = self._new_trainer()

    def refit(
        self, rollouts: Sequence[Rollout], *, budget_s: float, soft_targets: SoftTargetStore | None = None
    ) -> RefitReport:
        """Learn for at most `budget_s` seconds; take the weights if the held-out slice likes them.

        A step is begun only when it and the closing evaluation are expected to end in time, by what such
        work has cost so far. When not even one step is, nothing is done (`no_time`). The very first call
        has nothing to go by and may overshoot by two evaluations.
        Raises NumericsError when a rollout holds what is not finite.
        """
        budget = TimeBudget(budget_s, self._clock)
        data = distillation_batches(
            rollouts,
            soft_targets=soft_targets,
            max_tokens=self._settings.max_tokens_per_step,
            pad_token_id=self._pad_token_id,
        )
        if not data.batches:
            return self._report("one_sample", budget)
        needed_s = 2 * self._evaluate_s(data) + max(self._step_s(data, rows) for rows in data.batches)
        if budget_s <= 0.0 or not budget.admits(needed_s):
            self._costs.relieve()
            return self._report("no_time", budget)
        return self._try(data, budget)

    def save(self, path: Path) -> None:
        """Write all that goes on from here into a file. Raises StorageError."""
        facts = {
            "weight_version": self.weight_version,
            "rate_scale": self._rate_scale,
            "random": self._rng.bit_generator.state,
        }
        write_draft_state(path, self._trainer, facts)

    def load(self, path: Path) -> None:
        """Go on where `save` was called; what work has cost is learned again. Raises ConfigError: it does not fit."""
        self._trainer = self._new_trainer()
        facts = read_draft_state(path, self._trainer)
        try:
            self._rng.bit_generator.state = facts["random"]
            self._rate_scale = float(facts["rate_scale"])
            self.weight_version = int(facts["weight_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise no_draft_state(path, error) from error
        self._trainer.learning_rate = self._settings.learning_rate * self._rate_scale

    def weights(self) -> Generator[tuple[str, Tensor]]:
        """The draft model's weights to be published, in name order."""
        yield from unique_tensors(self.model)

    def _try(self, data: DistillationBatches, budget: TimeBudget) -> RefitReport:
        """Train, and keep what came of it only if the held-out divergence is no larger."""
        before = self._evaluate(data)
        old = [parameter.detach().clone() for parameter in self.model.parameters()]
        learned = list(self._train(data, budget))
        if not learned:
            return self._report("no_time", budget, before=before)
        # a weight that no held-out token reads may be infinite though the divergence is not
        finite = all(math.isfinite(loss) for loss, _ in learned) and not not_finite(
            self.model.named_parameters()
        )
        after = self._evaluate(data) if finite else math.nan
        if after <= before:
            self.weight_version += 1
            self._rate_scale = min(1.0, self._rate_scale * RATE_AFTER_SUCCESS)
            self._trainer.learning_rate = self._settings.learning_rate * self._rate_scale
            outcome = "taken"
        else:
            self._give_up(old)
            outcome = "worse" if math.isfinite(after) else "not_finite"
        num_tokens = sum(num for _, num in learned)
        return self._report(
            outcome, budget, num_steps=len(learned), num_tokens=num_tokens, before=before, after=after
        )

    def _train(self, data: DistillationBatches, budget: TimeBudget) -> Iterator[tuple[float, int]]:
        """Take steps while they fit; yield loss and tokens of each. A loss that is not finite is the last."""
        for rows in self._order(data.batches):
            if not budget.admits(self._step_s(data, rows) + self._evaluate_s(data)):
                return
            with self._costs.timed("step", data.num_tokens(rows)):
                loss = self._divergence(data, rows).mean()
                value = float(loss.detach())
                if math.isfinite(value):
                    self._trainer.apply(loss)
            yield value, data.num_response_tokens(rows)
            if not math.isfinite(value):
                return

    def _order(self, batches: list[list[int]]) -> Iterator[list[int]]:
        for _ in range(self._settings.max_passes):
            for i in self._rng.permutation(len(batches)):
                yield batches[i]

    @torch.no_grad()
    def _evaluate(self, data: DistillationBatches) -> float:
        with self._costs.timed("evaluation", data.num_tokens(data.held_out)):
            return float(self._divergence(data, data.held_out).mean())

    def _divergence(self, data: DistillationBatches, rows: list[int]) -> Tensor:
        return data.divergence(
            self.model,
            rows,
            temperature=self._temperature,
            vocab_size=self._vocab_size,
            compute_dtype=self._compute_dtype,
        )

    def _evaluate_s(self, data: DistillationBatches) -> float:
        return self._costs.expected_s("evaluation", data.num_tokens(data.held_out)) or 0.0

    def _step_s(self, data: DistillationBatches, rows: list[int]) -> float:
        num_tokens = data.num_tokens(rows)
        known_s = self._costs.expected_s("step", num_tokens)
        if known_s is None:
            known_s = LEARN_OVER_EVALUATE * (self._costs.expected_s("evaluation", num_tokens) or 0.0)
        return known_s

    def _give_up(self, old: list[Tensor]) -> None:
        """Put the old weights back; Adam begins anew, since its moments are those of the lost ones."""
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), old, strict=True):
                parameter.copy_(value)
        self._rate_scale *= RATE_AFTER_FAILURE
        self._trainer = self._new_trainer()

    def _new_trainer(self) -> SupervisedTrainer:
        learning_rate = self._settings.learning_rate * self._rate_scale
        trainer = SupervisedTrainer(self.model, learning_rate=learning_rate, warmup_steps=WARMUP_STEPS)
        prepare_for_training(self.model, gradient_checkpointing=False)
        return trainer

    def _report(
        self,
        outcome: Outcome,
        budget: TimeBudget,
        *,
        num_steps: int = 0,
        num_tokens: int = 0,
        before: float = math.nan,
        after: float = math.nan,
    ) -> RefitReport:
        return RefitReport(
            outcome=outcome,
            weight_version=self.weight_version,
            num_steps=num_steps,
            num_tokens=num_tokens,
            kl_before=before if math.isfinite(before) else None,
            kl_after=after if math.isfinite(after) else None,
            refit_s=budget.spent_s,
        )
