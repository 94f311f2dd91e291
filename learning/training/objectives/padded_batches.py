"""What pairs of models are made with: padded batches of examples, and the losses on their responses.

Source: Ouyang et al. 2022, section 3.5 (supervised fine-tuning before RL).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ....engine.weights.causal_lm import PreTrainedModel
from ..batching import pack_by_length, pad_right


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One supervised example: the loss is taken on tokens from `num_prompt_tokens` on."""

    token_ids: np.ndarray
    "[T] int64, prompt and response"
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedBatch:
    """A padded batch. `where` marks the positions (of ids[:, 1:]) that are predicted."""

    ids: Tensor
    "[B, T] int64"
    where: Tensor
    "[B, T - 1] bool"


def supervised_batches(
    examples: Sequence[Example], *, max_tokens: int, pad_token_id: int, rng: np.random.Generator
) -> list[SupervisedBatch]:
    """Pad examples of similar length together, at most `max_tokens` a batch, in random order."""
    packs = pack_by_length([len(example.token_ids) for example in examples], max_tokens)
    batches = [_collate([examples[i] for i in packs[j]], pad_token_id) for j in rng.permutation(len(packs))]
    return batches


def _collate(examples: Sequence[Example], pad_token_id: int) -> SupervisedBatch:
    ids, mask = pad_right([example.token_ids for example in examples], pad_token_id=pad_token_id)
    first = torch.tensor([example.num_prompt_tokens for example in examples])
    position = torch.arange(1, ids.shape[1])
    return SupervisedBatch(ids=ids, where=mask[:, 1:] & (position[None] >= first[:, None]))


def next_token_loss(model: PreTrainedModel, batch: SupervisedBatch) -> Float[Tensor, ""]:
    """Cross-entropy of the marked tokens, in nats a token."""
    logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits[batch.where].float(), batch.ids[:, 1:][batch.where])


def distilled_loss(
    student: PreTrainedModel, teacher: PreTrainedModel, batch: SupervisedBatch
) -> Float[Tensor, ""]:
    """KL(teacher || student) at the marked positions, in nats a token; no gradient reaches the teacher.

    Source: Hinton et al. 2015, section 2; Zhou et al. 2024, 'DistillSpec' (forward KL for drafting).
    """
    with torch.no_grad():
        teacher_logits = teacher(input_ids=batch.ids, use_cache=False).logits[:, :-1][batch.where]
    logits = student(input_ids=batch.ids, use_cache=False).logits[:, :-1][batch.where]
    return distillation_loss(logits, teacher_logits)


def distillation_loss(
    student_logits: Float[Tensor, "M V"], teacher_logits: Float[Tensor, "M V"]
) -> Float[Tensor, ""]:
    """Mean over positions of KL(teacher || student), in nats."""
    return torch.nn.functional.kl_div(
        torch.log_softmax(student_logits.float(), dim=-1),
        torch.log_softmax(teacher_logits.float(), dim=-1),
        log_target=True,
        reduction="batchmean",
    )
