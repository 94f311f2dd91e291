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
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ...core.errors import NotFiniteError
from ...core.records import Rollout
from ...engine.decoding.logprobs import scaled_logits
from ...engine.weights.causal_lm import PreTrainedModel
from ...engine.weights.shared_ids import foreign_of, without
from ..training.batching import num_unique, pack_by_length
from ..training.experience import Experience, collate
from ..training.trainer_core import OneForward
from ..training.training_forward import response_logits
from .draft_learner import (
    DraftLearner,
    DraftTerms,
    Outcome,
    RefitReport,
)
from .held_out import is_held_out, is_no_worse
from .soft_targets import SoftTargetStore, soft_kl, targets_without

LEARN_OVER_EVALUATE = 4.0
"A step's cost over an evaluation's, before any step has been timed."
_REMEMBERED = 8
_RELIEF = 0.9
"A refusal makes what is remembered so much cheaper: one slow moment must not refuse work for good."


class DraftRefitter(DraftLearner):
    """Learns after an update, from its rollouts."""

    def __init__(
        self, model: PreTrainedModel, terms: DraftTerms, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(model, terms)
        self._clock = clock
        self._costs = WorkCosts(clock)
        self._rng = np.random.default_rng([terms.seed, 0xD4AF])

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
            max_tokens=self._terms.settings.max_tokens_per_step,
            pad_token_id=self._terms.pad_token_id,
        )
        if not data.batches:
            return self._report("one_sample", budget)
        needed_s = 2 * self._evaluate_s(data) + max(self._step_s(data, rows) for rows in data.batches)
        if budget_s <= 0.0 or not budget.admits(needed_s):
            self._costs.relieve()
            return self._report("no_time", budget)
        return self._try(data, budget)

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {"random": self._rng.bit_generator.state}

    def _take_facts(self, facts: Mapping[str, Any]) -> None:
        self._rng.bit_generator.state = facts["random"]
        super()._take_facts(facts)

    def _try(self, data: DistillationBatches, budget: TimeBudget) -> RefitReport:
        """Train, and keep what came of it only if the held-out divergence is no larger."""
        before = self._evaluate(data)
        self._remember()
        learned = list(self._train(data, budget))
        if not learned:
            self._before = []
            return self._report("no_time", budget, before=before)
        # a weight that no held-out token reads may be infinite though the divergence is not
        finite = all(math.isfinite(loss) for loss, _ in learned) and self._is_finite()
        after = self._evaluate(data) if finite else math.nan
        if is_no_worse(after, before):
            self._take()
            outcome = "taken"
        else:
            self._give_up()
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
                batch = OneForward(lambda _, rows=rows: self._divergence(data, rows).mean())
                value = math.nan
                with suppress(NotFiniteError):
                    self._trainer.learn(batch, "of a refit")
                    value = batch.value
            yield value, data.num_response_tokens(rows)
            if not math.isfinite(value):
                return

    def _order(self, batches: list[list[int]]) -> Iterator[list[int]]:
        for _ in range(self._terms.settings.max_passes):
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
            temperature=self._terms.temperature,
            vocab_size=self._terms.vocab_size,
            compute_dtype=self._terms.compute_dtype,
        )

    def _evaluate_s(self, data: DistillationBatches) -> float:
        return self._costs.expected_s("evaluation", data.num_tokens(data.held_out)) or 0.0

    def _step_s(self, data: DistillationBatches, rows: list[int]) -> float:
        num_tokens = data.num_tokens(rows)
        known_s = self._costs.expected_s("step", num_tokens)
        if known_s is None:
            known_s = LEARN_OVER_EVALUATE * (self._costs.expected_s("evaluation", num_tokens) or 0.0)
        return known_s

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationBatches:
    """The rollouts of one refit. `batches` and `held_out` are rows of the experience, never the same."""

    experience: Experience
    soft_targets: SoftTargetStore | None
    batches: list[list[int]]
    "empty when there is only one sample"
    held_out: list[int]

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Tokens of a forward over some rows."""
        return num_unique([self.experience.sequence(row) for row in rows])

    def num_response_tokens(self, rows: Sequence[int]) -> int:
        """Tokens of some rows that are learned from."""
        return int(self.experience.mask[list(rows)].sum())

    def divergence(
        self,
        draft: PreTrainedModel,
        rows: list[int],
        *,
        temperature: float,
        vocab_size: int,
        compute_dtype: torch.dtype = torch.float32,
    ) -> Float[Tensor, " M"]:
        """KL(target || draft) in nats at the response tokens of some rows; differentiable.

        From the soft targets where all rows have them. Else log p(token) - log q(token) of the sampled
        tokens: an estimate without bias for the distribution they were sampled from, one sample each. Ids that the
        draft never drafts have no part in either.
        """
        packed = self.experience.packed(rows)
        logits, _ = response_logits(draft, packed, vocab_size, compute_dtype=compute_dtype)
        foreign = foreign_of(draft.config, vocab_size)
        logprobs = torch.log_softmax(without(scaled_logits(logits, temperature), foreign), dim=-1)
        if self.soft_targets is not None:
            targets = self.soft_targets.of([self.experience.sample_indices[row] for row in rows])
            if targets is not None:
                return soft_kl(logprobs, targets if foreign is None else targets_without(targets, foreign))
        drafted = logprobs.gather(-1, packed.targets.to(draft.device)[:, None]).squeeze(-1)
        sampled = self.experience.sampling_logprobs[rows][self.experience.mask[rows]]
        divergence = sampled.to(draft.device) - drafted
        if foreign is None:
            return divergence
        return divergence.masked_fill(torch.isin(packed.targets, foreign).to(draft.device), 0.0)


def distillation_batches(
    rollouts: Sequence[Rollout],
    *,
    soft_targets: SoftTargetStore | None,
    max_tokens: int,
    pad_token_id: int,
) -> DistillationBatches:
    """Split rollouts into a held-out slice of at most `max_tokens` padded tokens and batches of as many.

    Whole groups are held out where there are several: samples of one prompt resemble each other. Samples that the
    update has left out, and so has no targets of, are left out here too.
    Raises NumericsError when a rollout holds what is not finite.
    """
    experience = collate(rollouts, pad_token_id=pad_token_id)
    rows = _rows_with_targets(experience, soft_targets)
    groups = dict(zip(rows, experience.group_ids[rows].tolist(), strict=True))
    if len(set(groups.values())) == 1:
        groups = {row: row for row in rows}
    chosen = {group for index, group in enumerate(sorted(set(groups.values()))) if is_held_out(index)}
    held_out = _packed([row for row, group in groups.items() if group in chosen], experience, max_tokens)
    training = [row for row, group in groups.items() if group not in chosen]
    return DistillationBatches(
        experience=experience,
        soft_targets=soft_targets,
        batches=_packed(training, experience, max_tokens),
        # packs come by length: when not all fit into one forward, those of middle length stand for all
        held_out=held_out[len(held_out) // 2],
    )


def _rows_with_targets(experience: Experience, soft_targets: SoftTargetStore | None) -> list[int]:
    """Rows that the update has set targets aside for; all rows where these are too few to learn from."""
    rows = list(range(len(experience.lengths)))
    if soft_targets is None:
        return rows
    kept = [row for row in rows if soft_targets.of([experience.sample_indices[row]]) is not None]
    return kept if len(kept) > 1 else rows


def _packed(rows: list[int], experience: Experience, max_tokens: int) -> list[list[int]]:
    packs = pack_by_length([experience.lengths[row] for row in rows], max_tokens)
    return [[rows[i] for i in pack] for pack in packs]


class WorkCosts:
    """Seconds a unit of each kind of work, remembered over a run; the dearest of the last few counts."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._s_per_unit: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    @contextmanager
    def timed(self, kind: str, num_units: int) -> Iterator[None]:
        """Remember what the block costs."""
        began_s = self.clock()
        yield
        self._s_per_unit[kind].append((self.clock() - began_s) / max(num_units, 1))

    def expected_s(self, kind: str, num_units: int) -> float | None:
        """Seconds that so many units will take; None when none has been done yet."""
        seen = self._s_per_unit.get(kind)
        return max(seen) * num_units if seen else None

    def relieve(self) -> None:
        """Lower every estimate a little, because work was refused by them."""
        for seen in self._s_per_unit.values():
            for i, value in enumerate(seen):
                seen[i] = value * _RELIEF


class TimeBudget:
    """Seconds that end at a fixed time."""

    def __init__(self, budget_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = clock()
        self._end_s = self._began_s + budget_s

    @property
    def spent_s(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began_s

    def admits(self, seconds: float) -> bool:
        """True when work of so many seconds ends in time."""
        return self._clock() + seconds <= self._end_s
