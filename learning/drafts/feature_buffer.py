"""Feature sequences that wait to be learned from, bounded in bytes, drawn by how much a head fails on them.

Source: Hu et al. 2025, 'TLT' (arXiv 2511.16665), section 4.2 (online data buffer, one-step offset).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhfspec.core.errors import ConfigError
from rlhfspec.engine.drafters.head.feature_sequence import FeatureSequence
from rlhfspec.learning.drafts.packed_features import num_anchors

LEAST_NEED = 0.02
"A sequence that a head has learned is drawn again now and then: what is learned may be lost."


@dataclass(slots=True, eq=False)
class _Kept:
    sequence: FeatureSequence
    iteration: int
    need: float = 1.0
    num_visits: int = 0
    "times drawn"
    num_passes: int = 0
    "times learned from"


class FeatureBuffer:
    """Holds sequences of the iteration in progress, and of the one before it those that there is room for.

    Responses finish in the order of their lengths: early in an iteration only short ones are there. So of the previous
    iteration's the longest stay longest.
    """

    def __init__(self, max_bytes: int, *, max_passes: int = 1 << 62) -> None:
        """A sequence that was learned from `max_passes` times is drawn no more.

        Raises ConfigError unless `max_bytes` is above 0.
        """
        if max_bytes <= 0:
            raise ConfigError(
                f"the buffer of a draft head's features expects max_bytes above 0, got {max_bytes}"
            )
        self.max_bytes = max_bytes
        self._max_passes = max_passes
        self.num_bytes = 0
        self._kept: list[_Kept] = []
        self._iteration = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, sequence: FeatureSequence) -> bool:
        """Keep a sequence; returns False where it alone is larger than the buffer, or has nothing to learn.

        Room is made by leaving out, first, the previous iteration's shortest, then those of this one that were visited
        most and are needed least.
        """
        if not num_anchors(sequence) or sequence.num_bytes > self.max_bytes:
            return False
        while self.num_bytes + sequence.num_bytes > self.max_bytes:
            self._leave_out(min(self._kept, key=self._worth))
        self._kept.append(_Kept(sequence, self._iteration))
        self.num_bytes += sequence.num_bytes
        return True

    def next_iteration(self) -> None:
        """A new iteration begins: what is older than the one that ends is left out."""
        for each in [each for each in self._kept if each.iteration < self._iteration]:
            self._leave_out(each)
        self._iteration += 1

    def sample(self, rng: np.random.Generator, max_tokens: int) -> list[FeatureSequence]:
        """Draw different sequences of at most `max_tokens` response tokens in all, but at least one if any may be.

        A sequence's chance grows with its positions that the head is expected to fail on: those that no step has
        learned from count as failed. They are given with the longest first.
        """
        kept = [each for each in self._kept if each.num_passes < self._max_passes]
        if not kept:
            return []
        weights = np.array([max(each.need, LEAST_NEED) * num_anchors(each.sequence) for each in kept])
        # exponential clocks: an order drawn without putting back (Efraimidis and Spirakis 2006)
        order = np.argsort(rng.exponential(size=len(weights)) / weights)
        chosen: list[_Kept] = []
        room = max_tokens
        for place in order.tolist():
            size = kept[place].sequence.num_response_tokens
            if size <= room or not chosen:
                chosen.append(kept[place])
                room -= size
            if room <= 0:
                break
        for each in chosen:
            each.num_visits += 1
        return sorted((each.sequence for each in chosen), key=lambda one: -one.num_response_tokens)

    def learned(self, sequences: Sequence[FeatureSequence], needs: Sequence[float]) -> None:
        """Take what a step found: the share of each sequence's positions that the head is expected to fail on."""
        by_id = {id(sequence): need for sequence, need in zip(sequences, needs, strict=True)}
        for each in self._kept:
            if id(each.sequence) in by_id:
                each.need = by_id[id(each.sequence)]
                each.num_passes += 1

    def drop(self, sequences: Sequence[FeatureSequence]) -> None:
        """Leave these out: nothing can be learned from them."""
        ids = {id(sequence) for sequence in sequences}
        for each in [each for each in self._kept if id(each.sequence) in ids]:
            self._leave_out(each)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self.num_bytes = 0

    def _worth(self, each: _Kept) -> tuple[int, int, float]:
        length = each.sequence.num_response_tokens
        if each.iteration < self._iteration:
            return each.iteration, length, 0.0
        return each.iteration, -each.num_visits, each.need * length

    def _leave_out(self, each: _Kept) -> None:
        self._kept.remove(each)
        self.num_bytes -= each.sequence.num_bytes
