"""What the draft model learns from in one refit: rollouts in batches, a slice held out, the divergence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from rlhfspec.core.records import Rollout
from rlhfspec.engine.decoding.logprobs import scaled_logits
from rlhfspec.engine.weights.shared_ids import foreign_of, without
from rlhfspec.learning.drafts.soft_targets import SoftTargetStore, soft_kl, targets_without
from rlhfspec.learning.trainer.batching import pack_by_length
from rlhfspec.learning.trainer.experience import Experience, collate
from rlhfspec.learning.trainer.training_forward import response_logits

HOLD_OUT_EVERY = 8
"One group of samples in so many is held out."


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
        return sum(self.experience.lengths[row] for row in rows)

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
    chosen = set(sorted(set(groups.values()))[::HOLD_OUT_EVERY])
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
