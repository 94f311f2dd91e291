"""A small supervised trainer: next-token cross-entropy on the response part of examples.

Source: Ouyang et al. 2022, section 3.5 (supervised fine-tuning before RL).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from rlhfspec.core.errors import ConfigError
from rlhfspec.learning.trainer.batching import pack_by_length, pad_right
from rlhfspec.learning.trainer.training_forward import require_master_weights


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


class SupervisedTrainer:
    """AdamW with linear warm-up; the caller sets the learning rate as it goes."""

    def __init__(self, model: PreTrainedModel, *, learning_rate: float, warmup_steps: int = 50) -> None:
        self.model = model.train().requires_grad_(True)
        require_master_weights(model)
        self.learning_rate = learning_rate
        self._warmup_steps = warmup_steps
        self._num_steps = 0
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01
        )

    def step(self, batch: SupervisedBatch) -> float:
        """Take one optimizer step on the cross-entropy; return it in nats per token."""
        logits = self.model(input_ids=batch.ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[batch.where].float(), batch.ids[:, 1:][batch.where])
        self.apply(loss)
        return float(loss.detach())

    def distill(self, teacher: PreTrainedModel, batch: SupervisedBatch) -> float:
        """Take one step towards the teacher's distribution, not the data's; return the KL before it, in nats a token.

        Source: Hinton et al. 2015, section 2; Zhou et al. 2024, 'DistillSpec' (forward KL for drafting).
        """
        with torch.no_grad():
            teacher_logits = teacher(input_ids=batch.ids, use_cache=False).logits[:, :-1][batch.where]
        logits = self.model(input_ids=batch.ids, use_cache=False).logits[:, :-1][batch.where]
        loss = distillation_loss(logits, teacher_logits)
        self.apply(loss)
        return float(loss.detach())

    def state(self) -> dict[str, Tensor]:
        """Weights and the optimizer's moments by name, to be read only; `load_state` takes them."""
        found = {"num_steps": torch.tensor(self._num_steps)}
        for name, parameter in self.model.named_parameters():
            found[f"model.{name}"] = parameter.detach()
            for part, value in self._optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{name}.{part}"] = value
        return found

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken. Raises ConfigError when it is another model's."""
        parameters = dict(self.model.named_parameters())
        shapes = {f"model.{name}": parameter.shape for name, parameter in parameters.items()}
        if shapes != {name: value.shape for name, value in state.items() if name.startswith("model.")}:
            raise ConfigError(
                "the saved draft model has other weights than this one; resume with the same models"
            )
        self._num_steps = int(state["num_steps"])
        self._optimizer.state.clear()
        for name, parameter in parameters.items():
            parameter.copy_(state[f"model.{name}"])
            prefix = f"optimizer.{name}."
            parts = {
                key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)
            }
            if parts:
                # Adam counts its steps on the CPU
                self._optimizer.state[parameter] = {
                    part: value.clone() if part == "step" else value.to(parameter.device, copy=True)
                    for part, value in parts.items()
                }

    def apply(self, loss: Tensor) -> None:
        """Backpropagate a loss and take the optimizer step, gradient norm clipped at 1."""
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.take_step()

    def take_step(self) -> None:
        """Take the optimizer step with the gradients that are there, their norm clipped at 1."""
        self._num_steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate * min(1.0, self._num_steps / self._warmup_steps)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()


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
