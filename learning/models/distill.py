"""Distils a draft model from its target: the draft learns the target's distribution, not the data's.

Source: Hinton et al. 2015, section 2; Zhou et al. 2024, 'DistillSpec' (forward KL for drafting).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from rlhfspec.learning.trainer.next_token import SupervisedBatch, SupervisedTrainer


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


def distill_step(trainer: SupervisedTrainer, teacher: PreTrainedModel, batch: SupervisedBatch) -> float:
    """Take one step of the student towards the teacher on a batch; return the KL before it."""
    with torch.no_grad():
        teacher_logits = teacher(input_ids=batch.ids, use_cache=False).logits[:, :-1][batch.where]
    student_logits = trainer.model(input_ids=batch.ids, use_cache=False).logits[:, :-1][batch.where]
    loss = distillation_loss(student_logits, teacher_logits)
    trainer.apply(loss)
    return float(loss.detach())
