"""Forwards over rollouts: the tokens of each sample, none of padding, within a number of tokens a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from learning.experience import Experience
from learning.forward.batching import PackedSequences, pack_tokens
from learning.forward.token_statistics import token_statistics
from learning.forward.training_forward import response_logits


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyForward:
    """How a learner computes: the same way for the policy, its hidden states and the reference."""

    vocab_size: int
    "token ids that take part; padded ones above do not"
    temperature: float
    max_tokens: int
    "in one forward"
    compute_dtype: torch.dtype
    "of matrix products"

    def packs(self, rows: Sequence[int], experience: Experience) -> list[list[int]]:
        """Rows whose tokens go through one forward together."""
        rows = list(rows)
        packs = pack_tokens([experience.lengths[row] for row in rows], self.max_tokens)
        return [[rows[i] for i in pack] for pack in packs]

    def logits(self, model: PreTrainedModel, packed: PackedSequences) -> tuple[Tensor, Tensor]:
        """Logits [M, V] and hidden states [M, H] that predict the pack's targets."""
        return response_logits(model, packed, self.vocab_size, compute_dtype=self.compute_dtype)

    @torch.no_grad()
    def logprobs(self, model: PreTrainedModel, experience: Experience) -> Tensor:
        """Log-probabilities of all response tokens, [B, R] padded, on the CPU."""
        out = torch.zeros(experience.mask.shape)
        for rows in self.packs(range(len(out)), experience):
            packed = experience.packed(rows)
            logits, _ = self.logits(model, packed)
            flat, _ = token_statistics(
                logits, packed.targets.to(logits.device), self.temperature, entropy=False
            )
            out[rows] = padded(flat.cpu(), experience.mask[rows])
        return out

    @torch.no_grad()
    def hidden_states(self, model: PreTrainedModel, experience: Experience) -> Tensor:
        """Last hidden states that predict each response token, [num_tokens, H] in row-major order."""
        place = torch.full(experience.mask.shape, -1)
        place[experience.mask] = torch.arange(experience.num_tokens)
        out: Tensor | None = None
        for rows in self.packs(range(len(place)), experience):
            _, hidden = response_logits(
                model,
                experience.packed(rows),
                self.vocab_size,
                compute_dtype=self.compute_dtype,
                with_logits=False,
            )
            if out is None:
                out = hidden.new_zeros((experience.num_tokens, hidden.shape[1]))
            out[place[rows][experience.mask[rows]].to(out.device)] = hidden
        assert out is not None, "collate refuses an empty batch"
        return out


def padded(flat: Tensor, mask: Tensor) -> Tensor:
    """One number a real token, row-major, as [B, R] with zeros elsewhere."""
    out = torch.zeros(mask.shape)
    out[mask] = flat
    return out
