"""When will the open samples be done with n instances? The pool as one, its samples spread evenly at every moment.

As in `policies.reallocation.finish_time`, over the samples of the whole pool: in each cell of further tokens, n
instances share what still runs. Samples beyond the slots take turns. More instances are never slower.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..reallocation.finish_time import SURE
from ..reallocation.rate_curve import RateCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The open samples and what an instance delivers; X cells of further tokens."""

    curve: RateCurve
    cell_tokens: int
    sums: np.ndarray
    "[3, X] as `Load.sums`, over all samples that an added instance could share"
    num_slots: int
    "of an instance"

    def finish_s(self, num_instances: int, *, now: int | None = None, start_up_s: float = 0.0) -> float:
        """Expected seconds until the last sample is done.

        Args:
            num_instances: n.
            now: instances until `start_up_s` is over, at most n; None: n from the start.
            start_up_s: until the others join.
        """
        any_left = -np.expm1(np.minimum(self.sums[1], 0.0))
        cell_s = self._cell_s(num_instances, any_left)
        if now is not None and now < num_instances:
            before_s = self._cell_s(now, any_left)
            # a cell that has begun when they join goes on as it began
            has_begun = np.cumsum(before_s) - before_s < start_up_s
            cell_s = np.where(has_begun, before_s, cell_s)
        return float((any_left * cell_s).sum())

    def _cell_s(self, num_instances: int, any_left: np.ndarray) -> np.ndarray:
        """[X] seconds that n instances take for each cell, given that a sample is left."""
        given = np.maximum(any_left, SURE)
        each = np.maximum(self.sums[0], any_left) / given / max(num_instances, 1)
        context = np.maximum(self.sums[2], 0.0) / given / max(num_instances, 1)
        at_once = np.minimum(each, self.num_slots)
        turns = np.maximum(each / self.num_slots, 1.0)
        return self.cell_tokens * turns * self.curve.seconds_per_token(at_once, context / turns)
