"""The target model's own distributions, kept while it is trained, for the draft model to learn from.

The update computes the logits of every response token anyway; the likeliest tokens of each position are
set aside here, so distillation needs no forward of the teacher. They are those of the last epoch, at most
one update old. What is not among the kept tokens counts as one event, 'any other token'.

Source: Hinton et al. 2015, section 2 (soft targets); co-training a drafter on the target's training
forward is what NeMo-RL does with EAGLE heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...engine.weights.shared_ids import NEVER
from ..training.objectives.policy import SeenLogits
from ..training.parallel import OneTrainer

_SMALLEST_REST = 1e-6
"Float32 cannot tell a smaller remaining probability from rounding."


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftTargets:
    """The likeliest `K` tokens at `M` positions, with their log-softmax over the whole vocabulary."""

    token_ids: Int[Tensor, "M K"]
    logprobs: Float[Tensor, "M K"]
    step: int = 0
    "of the optimizer, whose weights said so"


class SoftTargetStore:
    """Soft targets of one update's responses, by sample index; on the CPU."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._of: dict[int, SoftTargets] = {}
        self._on_device: list[tuple[list[int], list[int], SoftTargets]] = []

    def begin(self) -> None:
        """Forget everything: a new update begins."""
        self._of.clear()
        self._on_device.clear()

    def observe(self, seen: SeenLogits) -> None:
        """Keep what some responses' logits say; an earlier epoch's are replaced. See `LogitsObserver`."""
        if self.num_tokens == 0:
            return
        scaled = seen.scaled
        with torch.no_grad():
            likeliest, token_ids = scaled.topk(min(self.num_tokens, scaled.shape[1]), dim=-1)
            logprobs = (likeliest - scaled.logsumexp(dim=-1, keepdim=True)).float()
        found = SoftTargets(token_ids=token_ids.int(), logprobs=logprobs, step=seen.step)
        self._on_device.append((list(seen.sample_indices), list(seen.lengths), found))

    def end(self, trainers: OneTrainer) -> dict[str, float]:
        """Give the first trainer what all have kept of their shares. Collective."""
        self.merge(trainers.gather_to_first(self.kept))
        return {}

    def step(self) -> None:
        """Bring what was kept to the CPU, when its forwards are done and waiting for it costs nothing."""
        for sample_indices, lengths, found in self._on_device:
            token_ids, logprobs = found.token_ids.cpu(), found.logprobs.cpu()
            rows = zip(token_ids.split(lengths), logprobs.split(lengths), strict=True)
            for index, (ids, values) in zip(sample_indices, rows, strict=True):
                # of its own: a view would travel with the whole pack
                self._of[index] = SoftTargets(token_ids=ids.clone(), logprobs=values.clone(), step=found.step)
        self._on_device.clear()

    @property
    def kept(self) -> dict[int, SoftTargets]:
        """What this trainer has kept, by sample index."""
        self.step()
        return self._of

    def merge(self, parts: Sequence[Mapping[int, SoftTargets]]) -> None:
        """Keep what all trainers have kept of their shares: of a sample that several had, the latest."""
        self.step()
        for part in parts:
            for index, targets in part.items():
                if index not in self._of or self._of[index].step <= targets.step:
                    self._of[index] = targets

    def of(self, sample_indices: Sequence[int]) -> SoftTargets | None:
        """Targets of some responses, one after another; None unless all of them have been kept."""
        self.step()
        if not self._of or any(index not in self._of for index in sample_indices):
            return None
        parts = [self._of[index] for index in sample_indices]
        return SoftTargets(
            token_ids=torch.cat([part.token_ids for part in parts]),
            logprobs=torch.cat([part.logprobs for part in parts]),
        )


def whole_kl(teacher: Float[Tensor, "M V"], student: Float[Tensor, "M V"]) -> Float[Tensor, " M"]:
    """KL(teacher || student) in nats of logits over the temperature; only the student has a gradient."""
    with torch.no_grad():
        known = torch.log_softmax(teacher.float(), dim=-1)
        probabilities = known.exp()
    difference = known - torch.log_softmax(student.float(), dim=-1)
    # what the teacher never says has no part: 0 times infinity
    return torch.where(probabilities > 0.0, probabilities * difference, 0.0).sum(dim=-1)


def soft_kl(student_logprobs: Float[Tensor, "M V"], targets: SoftTargets) -> Float[Tensor, " M"]:
    """KL(teacher || student) in nats over the kept tokens and 'any other token'.

    It is at most the whole KL (merging events loses information), and equal where every token is kept.
    """
    device = student_logprobs.device
    teacher = targets.logprobs.to(device)
    student = student_logprobs.gather(-1, targets.token_ids.to(device).long())
    kept = (teacher.exp() * (teacher - student)).sum(-1)
    teacher_rest, student_rest = _rest(teacher), _rest(student)
    other = teacher_rest * (teacher_rest.log() - student_rest.log())
    return kept + torch.where(teacher_rest > _SMALLEST_REST, other, torch.zeros_like(other))


def targets_without(targets: SoftTargets, foreign: Int[Tensor, " F"]) -> SoftTargets:
    """Return the same given that the token is none of `foreign`, as far as these are among the kept ones."""
    is_foreign = torch.isin(targets.token_ids, foreign.to(targets.token_ids.dtype))
    lost = targets.logprobs.exp().masked_fill(~is_foreign, 0.0).sum(-1, keepdim=True)
    logprobs = targets.logprobs - (1.0 - lost).clamp(min=_SMALLEST_REST).log()
    return replace(targets, logprobs=logprobs.masked_fill(is_foreign, NEVER))


def _rest(logprobs: Tensor) -> Tensor:
    return (1.0 - logprobs.exp().sum(-1)).clamp(min=_SMALLEST_REST)
