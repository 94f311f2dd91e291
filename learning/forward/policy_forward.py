"""Forwards over rollouts: the tokens of each sample, none of padding, within a number of tokens a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from learning.experience import Experience
from learning.forward.batching import PackedSequences, pack_tokens, share_rows
from learning.forward.token_statistics import token_statistics
from learning.forward.training_forward import response_logits
from learning.parallel.one_trainer import OneTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Rows whose tokens go through one forward together."""

    rows: list[int]
    is_filler: bool = False
    "computed for nothing, because another trainer has one more pack: forwards are collective where weights are shards"


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
    trainers: OneTrainer = field(default_factory=OneTrainer)

    def packs(self, rows: Sequence[int], experience: Experience) -> list[Pack]:
        """This trainer's share of some rows (the same ones for all trainers), as many packs as any trainer has."""
        rows = list(rows)
        lengths = [experience.lengths[row] for row in rows]
        packs = [
            [
                Pack(rows=[rows[share[i]] for i in pack])
                for pack in pack_tokens([lengths[i] for i in share], self.max_tokens)
            ]
            for share in share_rows(lengths, self.trainers.size)
        ]
        mine, most = packs[self.trainers.rank], max(len(one) for one in packs)
        shortest = min(rows, key=lambda row: (experience.lengths[row], row), default=0)
        return mine + [Pack(rows=[shortest], is_filler=True)] * (most - len(mine))

    def logits(
        self, model: PreTrainedModel, packed: PackedSequences, *, with_logits: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Logits [M, V] and hidden states [M, H] that predict the pack's targets; logits [0, V] where not wanted."""
        return response_logits(
            model,
            packed,
            self.vocab_size,
            compute_dtype=self.compute_dtype,
            with_logits=with_logits,
            keeps_casts=not self.trainers.is_sharded,
        )

    @torch.no_grad()
    def logprobs(self, model: PreTrainedModel, experience: Experience) -> Tensor:
        """Log-probabilities of all response tokens, [B, R] padded, on the CPU."""
        out = torch.zeros(experience.mask.shape)
        for pack in self.packs(range(len(out)), experience):
            packed = experience.packed(pack.rows)
            logits, _ = self.logits(model, packed)
            flat, _ = token_statistics(
                logits, packed.targets.to(logits.device), self.temperature, entropy=False
            )
            if not pack.is_filler:
                out[pack.rows] = padded(flat.cpu(), experience.mask[pack.rows])
        return self.trainers.sum(out)

    @torch.no_grad()
    def hidden_states(self, model: PreTrainedModel, experience: Experience) -> Tensor:
        """Last hidden states that predict each response token, [num_tokens, H] in row-major order."""
        place = torch.full(experience.mask.shape, -1)
        place[experience.mask] = torch.arange(experience.num_tokens)
        out: Tensor | None = None
        for pack in self.packs(range(len(place)), experience):
            _, hidden = self.logits(model, experience.packed(pack.rows), with_logits=False)
            if out is None:
                out = hidden.new_zeros((experience.num_tokens, hidden.shape[1]))
            if not pack.is_filler:
                out[place[pack.rows][experience.mask[pack.rows]].to(out.device)] = hidden
        assert out is not None, "collate refuses an empty batch"
        return self.trainers.sum(out)


def padded(flat: Tensor, mask: Tensor) -> Tensor:
    """One number a real token, row-major, as [B, R] with zeros elsewhere."""
    out = torch.zeros(mask.shape)
    out[mask] = flat
    return out
