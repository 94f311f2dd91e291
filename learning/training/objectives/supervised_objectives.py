"""What a supervised learner minimises: the surprise of given tokens, or the mistake about which response is better.

Each objective says what its items weigh, and computes sums over a pack of them: parts of a batch add up to its mean,
however they are packed and whoever computes them (`MeanBatch`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ....core.settings.supervised import DpoLossConfig
from ....engine.upload import upload
from ....engine.weights.causal_lm import PreTrainedModel
from ...data.preferences import PreferencePair
from ...data.supervised_rows import Demonstration
from ..batching import Pack, PackedSequences, shared_packs
from ..parallel import OneTrainer
from ..reward_head import packed_scores
from ..training_forward import response_statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSettings:
    """How all objectives compute."""

    compute_dtype: torch.dtype = torch.float32
    keeps_casts: bool = True
    "see `learning.training.training_forward.autocast`"
    max_tokens: int = 1 << 30
    "in one forward"


def learned_logprobs(
    model: PreTrainedModel,
    sequences: Sequence[np.ndarray],
    learned: Sequence[np.ndarray],
    vocab_size: int,
    forward: ForwardSettings,
) -> Float[Tensor, " M"]:
    """Of the marked tokens of sequences, in nats, one sequence after another."""
    return response_statistics(
        model,
        PackedSequences.of(sequences, learned),
        vocab_size,
        1.0,
        entropy=False,
        compute_dtype=forward.compute_dtype,
        keeps_casts=forward.keeps_casts,
    ).logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTokens:
    """Cross-entropy of the learned tokens in nats, mean over tokens (Ouyang et al. 2022, section 3.5).

    An item's weight multiplies its part of the sum, not of the number that the sum is divided by.
    """

    vocab_size: int
    "token ids that take part, as in the learner of RL"
    is_dynamic: bool = False
    "each token's loss times its probability, a constant (Wu et al. 2025, 'On the generalization of SFT')"

    def weight(self, item: Demonstration) -> float:
        """Its learned tokens."""
        return float(item.num_learned)

    def sums(
        self, model: PreTrainedModel, items: Sequence[Demonstration], forward: ForwardSettings
    ) -> dict[str, Tensor]:
        """The sum over the items."""
        ids, marks = [item.token_ids for item in items], [item.is_learned for item in items]
        logprobs = learned_logprobs(model, ids, marks, self.vocab_size, forward)
        if self.is_dynamic:
            logprobs = logprobs * logprobs.detach().exp()
        # a product lies otherwise in memory, and would be added up in another order
        if any(item.weight != 1.0 for item in items):
            factors = np.repeat(
                np.array([item.weight for item in items], dtype=np.float32),
                [item.num_learned for item in items],
            )
            (weights,) = upload([factors], logprobs.device)
            logprobs = logprobs * weights
        return {"loss": -logprobs.sum()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """Bradley-Terry loss in nats, mean over pairs."""

    center_coefficient: float = 0.0

    def weight(self, item: PreferencePair) -> float:
        """One: a long pair says no more than a short one."""
        return 1.0

    def sums(
        self, model: PreTrainedModel, items: Sequence[PreferencePair], forward: ForwardSettings
    ) -> dict[str, Tensor]:
        """Sums over the items; accuracy, margin and mean score too."""
        packed = PackedSequences.of([ids for item in items for ids in item.sequences])
        scores = packed_scores(
            model, packed, compute_dtype=forward.compute_dtype, keeps_casts=forward.keeps_casts
        )
        chosen, rejected = scores[0::2], scores[1::2]
        (margins,) = upload([np.array([item.margin for item in items], dtype=np.float32)], scores.device)
        loss = bradley_terry_loss(chosen, rejected, margins, center_coefficient=self.center_coefficient)
        metrics = preference_metrics(chosen, rejected)
        return {"loss": loss.sum()} | {name: values.sum() for name, values in metrics.items()}


@dataclass(slots=True)
class MeanBatch:
    """The mean of an objective over some items (`learning.training.trainer_core.Batch`)."""

    objective: Any
    "what an item weighs, and sums over items"
    items: Sequence[Any]
    forward: ForwardSettings
    trainers: OneTrainer
    step: int
    "that is taken by it, for messages"
    means: dict[str, float] = field(default_factory=dict)
    "of all trainers; filled by `finish`"
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _weight: float = 0.0
    "of all items, counted once: every pack asks"

    def __post_init__(self) -> None:
        self._weight = sum(self.objective.weight(item) for item in self.items)

    @property
    def packs(self) -> list[Pack]:
        """See `Batch`."""
        return shared_packs([item.sequences for item in self.items], self.forward.max_tokens, self.trainers)

    def loss(self, model: PreTrainedModel, pack: Pack) -> Tensor:
        """See `Batch`."""
        share = 0.0 if pack.is_filler else 1.0 / self._weight
        found = self.objective.sums(model, [self.items[row] for row in pack.rows], self.forward)
        for name, value in found.items():
            part = value.detach().float() * share
            self._sums[name] = self._sums[name] + part if name in self._sums else part
        return found["loss"] * share

    def finish(self) -> None:
        """Add up what all trainers have computed. Collective."""
        names = sorted(self._sums)
        whole = self.trainers.sum(torch.stack([self._sums[name] for name in names]).cpu())
        self.means = dict(zip(names, whole.tolist(), strict=True))

    def problem(self, losses: Sequence[float]) -> str | None:
        """See `Batch`."""
        self.finish()
        if math.isfinite(self.means["loss"]):
            return None
        return (
            f"the loss of step {self.step} is {self.means['loss']}; expected a finite number; lower "
            "trainer.learning_rate"
        )


def bradley_terry_loss(
    chosen: Float[Tensor, " N"],
    rejected: Float[Tensor, " N"],
    margins: Float[Tensor, " N"],
    *,
    center_coefficient: float = 0.0,
) -> Float[Tensor, " N"]:
    """-log sigmoid(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2 of each pair, in nats.

    Sources: Ouyang et al. 2022, equation 1 (Bradley and Terry 1952); Touvron et al. 2023, 'Llama 2', equation 2 (the
    margin); Eisenstein et al. 2023, 'Helping or herding?', equation 2 (scores kept around zero).
    """
    loss = -F.logsigmoid(chosen - rejected - margins)
    if center_coefficient > 0.0:
        loss = loss + center_coefficient * (chosen + rejected) ** 2
    return loss


def preference_metrics(
    chosen: Float[Tensor, " N"], rejected: Float[Tensor, " N"]
) -> dict[str, Float[Tensor, " N"]]:
    """For each pair: whether the chosen response scores higher, by how much, and the mean score of the two."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "accuracy": (chosen > rejected).float(),
        "margin": chosen - rejected,
        "mean_reward": (chosen + rejected) / 2.0,
    }


def pair_losses(
    chosen: Float[Tensor, " N"], rejected: Float[Tensor, " N"], loss: DpoLossConfig
) -> Float[Tensor, " N"]:
    """The loss of each pair, by log(policy / reference) of the responses; of ipo and orpo their means over tokens.

    orpo has log-probabilities in the place of ratios, and this is its second term. Sources: Rafailov et al. 2023,
    'Direct preference optimization', equation 7; Mitchell 2023, 'A note on DPO with noisy preferences' (smoothing);
    Azar et al. 2023, 'A general theoretical paradigm', equation 17 (ipo); Zhao et al. 2023, 'SLiC-HF', equation 1
    (hinge); Hong et al. 2024, 'ORPO', equations 4 and 7.
    """
    margin = chosen - rejected
    if loss.type == "hinge":
        return torch.relu(1.0 - loss.beta * margin)
    if loss.type == "ipo":
        return (margin - 1.0 / (2.0 * loss.beta)) ** 2
    if loss.type == "orpo":
        return -loss.beta * F.logsigmoid(margin - (_log_complement(chosen) - _log_complement(rejected)))
    right, swapped = F.logsigmoid(loss.beta * margin), F.logsigmoid(-loss.beta * margin)
    return -right if not loss.label_smoothing else -torch.lerp(right, swapped, loss.label_smoothing)


def kto_losses(
    ratios: Float[Tensor, " N"], desirable: Float[Tensor, " N"], kl: float, loss: DpoLossConfig
) -> Float[Tensor, " N"]:
    """The loss of each response, by log(policy / reference); `desirable` is 1 or 0.

    Source: Ethayarajh et al. 2024, 'KTO: model alignment as prospect theoretic optimization', equation 8.
    """
    values = torch.sigmoid(loss.beta * (2.0 * desirable - 1.0) * (ratios - kl))
    weights = desirable * loss.desirable_weight + (1.0 - desirable) * loss.undesirable_weight
    return weights * (1.0 - values)


def _log_complement(logprobs: Tensor) -> Tensor:
    """log(1 - exp(x)) of x < 0. Source: Mächler 2012, 'Accurately computing log(1 - exp(-|a|))', equation 7."""
    near = logprobs > -math.log(2.0)
    return torch.where(near, torch.log(-torch.expm1(logprobs)), torch.log1p(-torch.exp(logprobs)))
