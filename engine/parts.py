"""How a model is dealt to the ranks of a group: by parts that no number of ranks changes.

A sum over an inner dimension is four sums over its parts, added as (a + b) + (c + d); a softmax's normalizer is that of
four parts' normalizers. A group of 1, 2 or 4 ranks holds whole branches of this tree, so that bits do not depend on it.
Source of the idea: tree-based invariant kernels, arXiv 2511.17826.
"""

from __future__ import annotations

from dataclasses import dataclass

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
