"""How many groups may have begun, and which an update learns from, where versions are taken whenever they come.

Instances decode from the newest version and pause only while one is loaded. A group begun under version v may hold
tokens of v, so update v + max_staleness is the last that may learn from it. A batch is the `groups_per_batch` groups
that ended first, but for those that would leave more behind than the updates to come can take in time; these are waited
for. Under version v no more than (v + 1 + max_staleness) batches may have begun, so that a batch always has room.

Sources: the bound on what has begun is AReaL's (arXiv 2505.24298, section 5.1), over-provisioning APRIL's
(arXiv 2509.18521, section 3): more groups run than the next update takes, and the longest are carried over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeAdmission:
    """Pure arithmetic. Versions and updates count from 0; update u makes version u + 1 of version u."""

    max_staleness: int
    "weight versions between a token and the update that learns from it, at most; at least 1"
    over_provisioning: float
    "batches that run beyond the next update's; as many as `max_staleness` leave little choice"
    groups_per_batch: int
    num_iterations: int

    def most_begun(self, version: int) -> int:
        """Groups that may have begun since the run's start while a version is the newest."""
        beyond = min(self.over_provisioning, self.max_staleness)
        groups = (version + 1) * self.groups_per_batch + math.ceil(round(beyond * self.groups_per_batch, 6))
        return min(groups, self.num_iterations * self.groups_per_batch)

    def choose(self, ended: Sequence[int], running: Sequence[int], update: int) -> list[int] | None:
        """Which groups an update learns from; None while it has to wait for some.

        Args:
            ended: under which version each whole group began, in the order in which they ended.
            running: the same of those that are not whole.
            update: its number.

        Returns:
            Places in `ended`, `groups_per_batch` of them.
        """
        size, chosen = self.groups_per_batch, list[int]()
        if len(ended) < size:
            return None
        for begun in sorted({*ended, *running}):
            # the updates from the next one on that may still learn from what began so early
            later = max(begun + self.max_staleness - update, 0)
            num_left = sum(one <= begun for one in (*ended, *running)) - later * size
            mine = [place for place, one in enumerate(ended) if one <= begun and place not in chosen]
            missing = num_left - sum(ended[place] <= begun for place in chosen)
            if missing > len(mine):
                return None
            chosen += mine[: max(missing, 0)]
        rest = [place for place in range(len(ended)) if place not in chosen]
        return sorted(chosen + rest[: size - len(chosen)])
