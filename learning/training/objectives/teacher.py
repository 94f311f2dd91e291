"""The teacher of on-policy distillation: a frozen causal LM whose distribution over the vocabulary the student learns.

Its forward runs over the packs that the student learns from, just before the student's: nothing of it is kept. It may
read another prompt than the student (`data.teacher_prompt_template`): what it is told beside the question is what the
student learns to do without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ....core.settings.algorithm import AlgorithmConfig
from ....engine.weights.causal_lm import PreTrainedModel
from ..batching import PackedSequences
from ..experience import Experience
from ..parallel import OneTrainer
from ..sharded import sources_of
from ..training_forward import hold_linears_in, prepare_for_training, require_packs, teacher_logits
from .distillation import Divergence
from .head_statistics import TeacherLogits


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A frozen model, and what is measured against it."""

    model: PreTrainedModel
    divergence: Divergence
    vocab_size: int
    "token ids that take part, as the student's"
    compute_dtype: torch.dtype
    trainers: OneTrainer

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        algorithm: AlgorithmConfig,
        *,
        vocab_size: int,
        compute_dtype: torch.dtype,
        trainers: OneTrainer,
    ) -> Teacher:
        """Freeze a model, divided over the trainers where weights are. Collective.

        Raises ModelError: its layers see what else is in a pack.
        """
        prepare_for_training(model, gradient_checkpointing=False)
        require_packs(model)
        is_unfilled = bool(sources_of(model))
        model.requires_grad_(False)
        hold_linears_in(model, compute_dtype)
        trainers.shard(model)
        if is_unfilled:
            require_packs(model)
        return cls(
            model=model,
            divergence=Divergence(beta=algorithm.distill_beta, top_k=algorithm.distill_top_k),
            vocab_size=vocab_size,
            compute_dtype=compute_dtype,
            trainers=trainers,
        )

    def logits(self, experience: Experience, rows: Sequence[int], packed: PackedSequences) -> TeacherLogits:
        """What it says of the tokens that a pack of some rows, on the CPU, is to predict once. Collective."""
        own = packed if experience.teacher_prompts is None else experience.packed_for_teacher(rows)
        _, first = np.unique(packed.which_once.numpy(), return_index=True)
        before, targets = own.before_targets[torch.from_numpy(first)], own.targets[torch.from_numpy(first)]
        return teacher_logits(
            self.model,
            replace(
                own,
                before_targets=before,
                targets=targets,
                before_once=before,
                targets_once=targets,
                which_once=torch.arange(len(first)),
            ),
            self.vocab_size,
            self.divergence,
            compute_dtype=self.compute_dtype,
            keeps_casts=not self.trainers.is_sharded,
        )
