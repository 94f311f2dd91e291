"""Direct preference optimisation: DPO, IPO, hinge, KTO and ORPO over log-probabilities of whole responses.

Sums are those of TRL 1.16: IPO compares means over a response's tokens, ORPO too, and learns all tokens of the chosen
sequence beside, prompt included, as a mean over the batch's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ....core.settings.supervised import DpoLossConfig
from ....engine.upload import upload
from ....engine.weights.causal_lm import PreTrainedModel
from ...data.feedback import Feedback
from ...data.supervised_rows import Demonstration
from ..batching import shared_packs
from ..parallel import OneTrainer
from .supervised_objectives import ForwardSettings, kto_losses, learned_logprobs, pair_losses

Values = Callable[[Sequence[Sequence[Demonstration]]], list[list[float]]]
"Log-probabilities of groups of responses by the model that learns, in nats."
_REFERENCE_ITEMS = 256
"Whose packs are made together: what a value rounds to depends on them alone."


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectPreferences:
    """The loss of `rlhfspec dpo`, mean over pairs, of kto over responses."""

    loss: DpoLossConfig
    vocab_size: int
    "token ids that take part, as in the learner of RL"
    kl: float = 0.0
    "of kto: of the policy and the reference over the batch, in nats, never below 0"
    chosen_share: float = 0.5
    "of the batch's responses"
    nll_weight: float = 0.0
    "of orpo: what a chosen token weighs beside a pair"

    def weight(self, item: Feedback) -> float:
        """One of a pair; of kto one of each response."""
        return float(len(item.responses)) if self.loss.type == "kto" else 1.0

    def of_batch(self, items: Sequence[Feedback], values: Values) -> DirectPreferences:
        """The same for the items of one batch."""
        chosen = [is_chosen for item in items for is_chosen in item.is_chosen]
        tokens = sum(item.responses[0].num_tokens - 1 for item in items)
        ratios = [0.0]
        if self.loss.type == "kto":
            policy = values([item.unrelated for item in items])
            held = [item.reference[len(item.responses) :] for item in items]
            ratios = np.subtract(np.concatenate(policy), np.concatenate(held))
        return replace(
            self,
            kl=max(float(np.mean(ratios)), 0.0),
            chosen_share=sum(chosen) / len(chosen),
            nll_weight=len(items) / max(tokens, 1),
        )

    def with_reference(self, items: Sequence[Feedback], values: Values) -> list[Feedback]:
        """The items with a model's log-probabilities, which the policy is compared with."""
        found: list[Feedback] = []
        for start in range(0, len(items), _REFERENCE_ITEMS):
            some = items[start : start + _REFERENCE_ITEMS]
            of_model = values([(*item.responses, *item.unrelated) for item in some])
            found += [replace(item, reference=tuple(own)) for item, own in zip(some, of_model, strict=True)]
        return found

    def sums(
        self, model: PreTrainedModel, items: Sequence[Feedback], forward: ForwardSettings
    ) -> dict[str, Tensor]:
        """Sums over the items; rewards of chosen and rejected ones too, whose means are over those alone."""
        responses = [one for item in items for one in item.responses]
        is_chosen = np.array([one for item in items for one in item.is_chosen])
        kind, is_kto = self.loss.type, self.loss.type == "kto"
        marks = [
            np.arange(one.num_tokens) > 0 if kind == "orpo" and chosen else one.is_learned
            for one, chosen in zip(responses, is_chosen, strict=True)
        ]
        counts = [int(mark.sum()) for mark in marks]
        ids = [one.token_ids for one in responses]
        logprobs = learned_logprobs(model, ids, marks, self.vocab_size, forward)
        learned = np.concatenate([one.is_learned[mark] for one, mark in zip(responses, marks, strict=True)])
        held = [value for item in items for value in item.reference[: len(item.responses)]]
        held = held or [0.0] * len(responses)
        numbers = [learned, held, [one.num_learned for one in responses], is_chosen]
        given = upload([np.asarray(one, dtype=np.float32) for one in numbers], logprobs.device)
        inside, reference, lengths, chosen = given
        ratios = _totals(logprobs * inside, counts) - reference
        scores = ratios / lengths if kind in ("ipo", "orpo") else ratios
        rewards = self.loss.beta * (scores if kind == "orpo" else ratios).detach()
        if is_kto:
            losses = kto_losses(scores, chosen, self.kl, self.loss)
            right = (scores.detach() > self.kl) == (chosen > 0.0)
        else:
            losses = pair_losses(scores[0::2], scores[1::2], self.loss)
            right = rewards[0::2] > rewards[1::2]
        loss = losses.sum()
        if kind == "orpo":
            loss = loss - self.nll_weight * _totals(logprobs, counts)[0::2].sum()
        found = {"loss": loss, "accuracy": right.float().sum()}
        if 0.0 < self.chosen_share < 1.0:
            # sums that the batch's weight makes means over the chosen, and over the rejected
            each = 1.0 if is_kto else 0.5
            found["chosen_reward"] = (rewards * chosen).sum() * (each / self.chosen_share)
            found["rejected_reward"] = (rewards * (1.0 - chosen)).sum() * (each / (1.0 - self.chosen_share))
            found["margin"] = found["chosen_reward"] - found["rejected_reward"]
        return found | ({"kl": torch.full_like(loss, self.kl * len(responses))} if is_kto else {})


@torch.no_grad()
def response_values(
    model: PreTrainedModel,
    vocab_size: int,
    forward: ForwardSettings,
    trainers: OneTrainer,
    groups: Sequence[Sequence[Demonstration]],
) -> list[list[float]]:
    """Log-probabilities of responses, of each group that is computed together. Collective."""
    starts = np.cumsum([0, *(len(group) for group in groups)])
    whole = torch.zeros(int(starts[-1]))
    sequences = [[one.token_ids for one in group] for group in groups]
    for pack in shared_packs(sequences, forward.max_tokens, trainers):
        found = [one for row in pack.rows for one in groups[row]]
        marks = [one.is_learned for one in found]
        logprobs = learned_logprobs(model, [one.token_ids for one in found], marks, vocab_size, forward)
        if not pack.is_filler:
            places = [at for row in pack.rows for at in range(starts[row], starts[row + 1])]
            whole[places] = _totals(logprobs, [one.num_learned for one in found]).float().cpu()
    flat = trainers.sum(whole).tolist()
    return [flat[start:end] for start, end in pairwise(starts)]


def _totals(logprobs: Tensor, counts: Sequence[int]) -> Float[Tensor, " N"]:
    return torch.stack([part.sum() for part in logprobs.split(list(counts))])
