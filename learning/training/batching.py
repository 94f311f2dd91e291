"""Batches of a bounded number of tokens: trees of sequences that begin alike, or sequences padded to one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...engine.attention.visibility import NEG_INF, chain_visibility
from ...engine.upload import upload
from .parallel import OneTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Tokens behind one another, the own ones of a sequence, and where those that it shares with earlier ones lie."""

    num_tokens: int
    before: tuple[tuple[int, int], ...]
    "(branch, how many of its first tokens), from the sequence's first token on; empty: it shares nothing"

    @property
    def path_tokens(self) -> int:
        """Tokens from the sequence's first to the branch's last."""
        return sum(count for _, count in self.before) + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Branches and their paths, behind one another, as one call of variable-length attention takes them."""

    own_starts: Int[Tensor, " S1"]
    "where each branch begins, and U behind the last: int32"
    starts: Int[Tensor, " S1"]
    "where its path begins"
    longest_own: int
    longest: int
    places: Int[Tensor, " K"] | None
    "of the tokens on the paths; None: each branch is its own"

    def along_paths(self, tokens: Tensor) -> Tensor:
        """Take [U, ...] as [K, ...]."""
        # its backward pass adds rows; that of an indexing sorts the places first
        return tokens if self.places is None else tokens.index_select(0, self.places)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequences:
    """Sequences as a tree, no padding: what several begin with is there once.

    `U` tokens in all, the own ones of one branch after another; `M` to be predicted, sequence by sequence, in the order
    that they were given in.
    """

    ids: Int[Tensor, " U"]
    position_ids: Int[Tensor, " U"]
    "from 0 in every sequence"
    branches: tuple[Branch, ...]
    places: tuple[Tensor, ...]
    "where the tokens of each sequence lie, int64 [length]"
    before_targets: Int[Tensor, " M"]
    "places of the tokens whose next one is to be predicted; one may have several next ones"
    targets: Int[Tensor, " M"]
    "the tokens to be predicted"
    before_once: Int[Tensor, " N"]
    "the same where sequences that have a token to be predicted in common predict it once"
    targets_once: Int[Tensor, " N"]
    which_once: Int[Tensor, " M"]
    "of the `N`, for each of the `M`"
    on_gpu: Paths | None = None
    _biases: dict[tuple[object, ...], Tensor] = field(default_factory=dict, init=False)

    @staticmethod
    def of(
        sequences: Sequence[np.ndarray],
        learned: Sequence[np.ndarray] | None = None,
        apart: Sequence[int] | None = None,
    ) -> PackedSequences:
        """Sequences of at least one token; `learned` marks those to be predicted, never a sequence's first.

        Sequences of different `apart` predict nothing together.
        """
        order, shared = neighbours(sequences)
        branches: list[Branch] = []
        path = np.zeros(max(len(sequence) for sequence in sequences), dtype=np.int64)
        on_path: list[tuple[int, int]] = []
        places: list[np.ndarray] = [path] * len(sequences)
        num_tokens = 0
        for index, same in zip(order, shared, strict=True):
            length = len(sequences[index])
            path[same:length] = np.arange(num_tokens, num_tokens + length - same)
            places[index] = path[:length].copy()
            on_path = _first_tokens(on_path, same)
            if length > same:
                branches.append(Branch(num_tokens=length - same, before=tuple(on_path)))
                on_path.append((len(branches) - 1, length - same))
                num_tokens += length - same
        own = [(sequences[index], same) for index, same in zip(order, shared, strict=True)]
        marked = [np.flatnonzero(marks) for marks in learned or [np.zeros(0)] * len(sequences)]
        at = list(zip(places, marked, strict=True))
        ids = np.concatenate([ids[same:] for ids, same in own]).astype(np.int64)
        before = np.concatenate([one[where - 1] for one, where in at])
        targets = np.concatenate([one[where] for one, where in at])
        kinds = 0 if apart is None else np.repeat(apart, [len(one) for one in marked])
        _, first, which = np.unique(targets + num_tokens * kinds, return_index=True, return_inverse=True)
        return PackedSequences(
            ids=torch.from_numpy(ids),
            position_ids=torch.cat([torch.arange(same, len(ids)) for ids, same in own]),
            branches=tuple(branches),
            places=tuple(torch.from_numpy(one) for one in places),
            before_targets=torch.from_numpy(before),
            targets=torch.from_numpy(ids[targets]),
            before_once=torch.from_numpy(before[first]),
            targets_once=torch.from_numpy(ids[targets[first]]),
            which_once=torch.from_numpy(which),
        )

    @property
    def inputs(self) -> dict[str, object]:
        """What a model's forward is called with."""
        rows = {"input_ids": self.ids[None], "position_ids": self.position_ids[None]}
        return {**rows, "packed": self, "use_cache": False}

    def to(self, device: torch.device) -> PackedSequences:
        """The same for a forward on a device."""
        return self.sent(device)[0]

    def sent(self, device: torch.device, *beside: np.ndarray) -> tuple[PackedSequences, list[Tensor]]:
        """The same for a forward on a device, and what goes there with it: all in one copy, not waited for."""
        if device.type == self.ids.device.type:
            return self, upload(beside, device)
        paths = self.paths()
        of_paths = [one.numpy() for one in (paths.own_starts, paths.starts, paths.places) if one is not None]
        own = [getattr(self, name).numpy() for name in _SENT]
        there = iter(upload([*own, *of_paths, *beside], device))
        moved = dict(zip(_SENT, there, strict=False))
        paths = replace(
            paths,
            own_starts=next(there),
            starts=next(there),
            places=None if paths.places is None else next(there),
        )
        return replace(self, on_gpu=paths, **moved), list(there)

    def paths(self) -> Paths:
        """The paths of all branches, on the CPU."""
        own = [branch.num_tokens for branch in self.branches]
        whole = [branch.path_tokens for branch in self.branches]
        own_starts, starts = ([0, *accumulate(lengths)] for lengths in (own, whole))
        along = [
            torch.arange(own_starts[other], own_starts[other] + count)
            for i, branch in enumerate(self.branches)
            for other, count in (*branch.before, (i, branch.num_tokens))
        ]
        return Paths(
            own_starts=torch.tensor(own_starts, dtype=torch.int32),
            starts=torch.tensor(starts, dtype=torch.int32),
            longest_own=max(own),
            longest=max(whole),
            places=None if own == whole else torch.cat(along),
        )

    def bias(self, branch: int, window: int | None, like: Tensor) -> Float[Tensor, "n path"]:
        """0 where a branch's own tokens see those of its path, -inf elsewhere; one tensor for all layers."""
        key = (branch, window, like.dtype, like.device)
        found = self._biases.get(key)
        if found is None:
            own, path = self.branches[branch].num_tokens, self.branches[branch].path_tokens
            start = torch.full((1,), path - own, device=like.device)
            seen = chain_visibility(start, own, path, window=window)[0]
            found = like.new_zeros(seen.shape).masked_fill_(~seen, NEG_INF)
            self._biases[key] = found
        return found


_SENT = ("ids", "position_ids", "before_targets", "targets", "before_once", "targets_once", "which_once")
"What a forward reads on its device."


def neighbours(sequences: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """An order in which sequences that begin alike follow each other, and the tokens that each shares with the last."""
    # big-endian bytes sort as the ids do
    order = sorted(range(len(sequences)), key=lambda i: np.asarray(sequences[i], dtype=">i8").tobytes())
    pairs = pairwise([sequences[index] for index in order])
    return order, [0, *(_num_shared(one, next_one) for one, next_one in pairs)][: len(order)]


def _num_shared(one: np.ndarray, other: np.ndarray) -> int:
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differ[0]) if len(differ) else shorter


def num_unique(sequences: Sequence[np.ndarray]) -> int:
    """Tokens of a tree of sequences."""
    return sum(len(sequence) for sequence in sequences) - sum(neighbours(sequences)[1])


def _first_tokens(path: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    ends = accumulate(count for _, count in path)
    kept = [(branch, min(count, most - end + count)) for (branch, count), end in zip(path, ends, strict=True)]
    return [(branch, count) for branch, count in kept if count > 0]


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


PATHS_PER_TOKEN = 8
"""Tokens on the paths of a pack, at most, for each token that a forward may have: attention copies the keys and values
of a path for its branch, and keeps them for the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bundle:
    items: list[int]
    num_tokens: int
    "of its tree"
    on_paths: int
    "of all its sequences"

    @property
    def size(self) -> int:
        """What it takes of a forward's tokens."""
        return max(self.num_tokens, -(-self.on_paths // PATHS_PER_TOKEN))


def _bundles(items: Sequence[Sequence[np.ndarray]], max_tokens: int) -> list[_Bundle]:
    """Items whose first sequences begin alike, as many together as fit into `max_tokens`; who share most come first.

    Source: Abouelhoda, Kurtz and Ohlebusch 2004, 'Replacing suffix trees with enhanced suffix arrays', algorithm 4.4
    (the tree of equal beginnings of a sorted list, bottom up, by a stack).
    """
    order, shared = neighbours([item[0] for item in items])
    unfinished: list[tuple[int, list[_Bundle]]] = [(0, [])]
    for index, with_next in zip(order, [*shared[1:], 0], strict=bool(order)):
        item = items[index]
        found = [_Bundle(items=[index], num_tokens=num_unique(item), on_paths=sum(len(one) for one in item))]
        while unfinished[-1][0] > with_next:
            least, before = unfinished.pop()
            found = _joined([*before, *found], least, max_tokens)
        if unfinished[-1][0] < with_next:
            unfinished.append((with_next, found))
        else:
            unfinished[-1][1].extend(found)
    return sorted(unfinished[0][1], key=lambda bundle: min(bundle.items))


def _joined(bundles: Sequence[_Bundle], shared: int, max_tokens: int) -> list[_Bundle]:
    """Neighbours that share so many tokens, as many together as fit."""
    found: list[_Bundle] = []
    for bundle in bundles:
        if found:
            together = _Bundle(
                items=found[-1].items + bundle.items,
                num_tokens=found[-1].num_tokens + bundle.num_tokens - shared,
                on_paths=found[-1].on_paths + bundle.on_paths,
            )
            if together.size <= max_tokens:
                found[-1] = together
                continue
        found.append(bundle)
    return found


def shared_packs(items: Sequence[Sequence[np.ndarray]], max_tokens: int, trainers: OneTrainer) -> list[Pack]:
    """This trainer's share of some items (the same ones for all trainers), as many packs as any trainer has.

    An item is sequences that are computed together. Those that begin alike come together, and a pack is filled by the
    tokens of its tree, or of its paths where those take more memory. Forwards are collective where weights are shards:
    who has fewer computes the shortest item for nothing.
    """
    total = num_unique([item[0] for item in items]) if trainers.size > 1 else 0
    bundles = _bundles(items, min(max_tokens, -(-total // trainers.size)) if total else max_tokens)
    sizes = [bundle.size for bundle in bundles]
    packs = [
        [[share[i] for i in pack] for pack in pack_tokens([sizes[i] for i in share], max_tokens)]
        for share in share_rows(sizes, trainers.size)
    ]
    mine = [Pack(rows=[row for i in pack for row in bundles[i].items]) for pack in packs[trainers.rank]]
    shortest = min(range(len(items)), key=lambda i: (num_unique(items[i]), i), default=0)
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
