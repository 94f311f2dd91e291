"""Packing and padding: sequences of unlike length into batches of a bounded number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlhfspec.learning.trainer.parallel import OneTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequences:
    """Sequences one after another, no padding; `T` tokens in all, `M` of them to be predicted."""

    ids: Int[Tensor, " T"]
    position_ids: Int[Tensor, " T"]
    "from 0 in every sequence"
    lengths: tuple[int, ...]
    "of the sequences; they sum to T"
    before_targets: Int[Tensor, " M"]
    "places of the tokens whose next one is to be predicted"

    @property
    def targets(self) -> Int[Tensor, " M"]:
        """The tokens to be predicted."""
        return self.ids[self.before_targets + 1]

    @property
    def starts(self) -> Int[Tensor, " starts"]:
        """Where each sequence begins, and T behind the last: int32."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Rows whose tokens go through one forward together."""

    rows: list[int]
    is_filler: bool = False
    "computed for nothing, because another trainer has one more pack"


def pack_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split indices into packs of at most `max_tokens` tokens: first fit, the longest first.

    The result depends on the lengths and their order alone. A sequence longer than `max_tokens` gets a pack of its
    own. Source: Johnson 1973 (first-fit decreasing: at most 11/9 of the fewest packs, and one more).
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = next((pack for pack, left in enumerate(room) if lengths[index] <= left), None)
        if fits is None:
            packs.append([index])
            room.append(max_tokens - lengths[index])
        else:
            packs[fits].append(index)
            room[fits] -= lengths[index]
    return packs


def share_rows(lengths: Sequence[int], num_shares: int) -> list[list[int]]:
    """Split indices into `num_shares` lists of nearly equal tokens, each in ascending order; some may be empty.

    The result depends on the lengths and their order alone: every trainer works out everyone's share.
    Source: Graham 1969 (longest first, to whoever has least: at most 4/3 of the best largest share).
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    load = [0] * num_shares
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        least = load.index(min(load))
        shares[least].append(index)
        load[least] += lengths[index]
    return [sorted(share) for share in shares]


def shared_packs(lengths: Sequence[int], max_tokens: int, trainers: OneTrainer) -> list[Pack]:
    """This trainer's share of some rows (the same ones for all trainers), as many packs as any trainer has.

    Forwards are collective where weights are shards: who has fewer computes the shortest row for nothing.
    """
    packs = [
        [[share[i] for i in pack] for pack in pack_tokens([lengths[i] for i in share], max_tokens)]
        for share in share_rows(lengths, trainers.size)
    ]
    mine = [Pack(rows=pack) for pack in packs[trainers.rank]]
    shortest = min(range(len(lengths)), key=lambda i: (lengths[i], i), default=0)
    filler = Pack(rows=[shortest], is_filler=True)
    return mine + [filler] * (max(len(one) for one in packs) - len(mine))


def pack_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split indices into batches whose padded size (rows x longest) stays within `max_tokens`.

    Indices come sorted by (length, index), so padding is small and the result depends on nothing
    else. A sequence longer than `max_tokens` gets a batch of its own.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[index] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def pad_right(
    sequences: Sequence[np.ndarray], *, pad_token_id: int
) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Stack int64 sequences, padded on the right; the mask is True on real tokens."""
    longest = max(len(sequence) for sequence in sequences)
    ids = torch.full((len(sequences), longest), pad_token_id, dtype=torch.int64)
    mask = torch.zeros((len(sequences), longest), dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.from_numpy(np.array(sequence, dtype=np.int64))
        mask[row, : len(sequence)] = True
    return ids, mask
