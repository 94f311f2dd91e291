"""How a model is dealt to the ranks of a group: by parts that no number of ranks changes.

A sum over an inner dimension is four sums over its parts, added as (a + b) + (c + d); a softmax's normalizer is that of
four parts' normalizers. A group of 1, 2 or 4 ranks holds whole branches of this tree, so that bits do not depend on it.
Source of the idea: tree-based invariant kernels, arXiv 2511.17826.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

PARTS = 4
"Leaves of the tree: the largest group."


def part_ends(count: int, step: int = 1) -> tuple[int, ...]:
    """Where the four parts of `count` end, in whole steps but for the last; parts are empty where there are few."""
    steps = -(-count // step)
    return tuple(min(step * -(-part * steps // PARTS), count) for part in range(1, PARTS + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank of a group holds."""

    rank: int = 0
    ranks: int = 1
    "1, 2 or 4"

    def of(self, count: int, step: int = 1) -> range:
        """Return this rank's part of `count` heads, columns or token ids; it may be empty."""
        ends, held = (0, *part_ends(count, step)), PARTS // self.ranks
        return range(ends[self.rank * held], ends[(self.rank + 1) * held])

    def of_vocabulary(self, vocab_size: int) -> range:
        """Return this rank's token ids; there may be none."""
        width = part_width(vocab_size) * (PARTS // self.ranks)
        return range(min(self.rank * width, vocab_size), min((self.rank + 1) * width, vocab_size))

    def ends(self, count: int, step: int = 1) -> tuple[int, ...]:
        """Return where the parts that this rank holds end, from its first on; empty ones are left out."""
        held = self.of(count, step)
        all_ends = sorted({end for end in part_ends(count, step) if held.start < end <= held.stop})
        return tuple(end - held.start for end in all_ends)


def part_width(vocab_size: int) -> int:
    """Return how many token ids a part of a vocabulary has; the last has what is left."""
    return -(-vocab_size // PARTS)


@runtime_checkable
class Ranks(Protocol):
    """The ranks of a group, as forwards and caches see them (`engine.group.ranks`)."""

    share: Share
    "this rank's"

    def add_up(self, x: Float[Tensor, "M N"], part: Float[Tensor, "M N"]) -> None:
        """Add all ranks' parts to x, in place, as (a + b) + (c + d). All ranks call it at once, with the same x."""
        ...

    def exchange(self, mine: Tensor) -> Tensor:
        """Return what all ranks have of the same shape, [ranks, ...]. All call it at once."""
        ...

    def order(self, kind: str, *tensors: Tensor, **what: Any) -> None:
        """On the leader: tell the other ranks what to do next; nothing on those."""
        ...

    def later(self, kind: str, *tensors: Tensor, **what: Any) -> None:
        """The same with the next order, ahead of it: for what only that one's results depend on."""
        ...

    def hand_on(
        self, names: Collection[str], parts: Iterable[Mapping[str, Tensor]]
    ) -> Generator[Mapping[str, Tensor]]:
        """On the leader: show a version of these weights to the other ranks, part by part as it comes."""
        ...
