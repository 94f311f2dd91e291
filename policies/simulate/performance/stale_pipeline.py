"""Generation and training with bounded staleness: who waits for whom, step after step.

Batch i may be generated once update i - 1 - K is in the instances, K being the staleness; it is trained when it is
whole. K = 0: in turns. At most K + 1 batches are under way, waiting ones and the one that trains included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """When each batch was generated and trained."""

    generation_start_s: tuple[float, ...]
    generation_end_s: tuple[float, ...]
    training_start_s: tuple[float, ...]
    training_end_s: tuple[float, ...]

    def staleness(self, batch: int) -> int:
        """Updates that were missing when this batch began, of those before its own."""
        begun = self.generation_start_s[batch]
        return batch - sum(end <= begun + 1e-9 for end in self.training_end_s[:batch])

    def step_s(self, first: int) -> float:
        """Mean seconds between the ends of updates, from that of batch `first` on."""
        last = len(self.training_end_s) - 1
        return (self.training_end_s[last] - self.training_end_s[first]) / (last - first)


def stale_pipeline(
    generation_s: Sequence[float], training_s: Sequence[float], *, staleness: int
) -> PipelineTimes:
    """Play batch after batch.

    Args:
        generation_s: [n] seconds of each rollout.
        training_s: [n] seconds from a whole batch to new weights in the instances.
        staleness: K, at least 0.
    """
    begun: list[float] = []
    made: list[float] = []
    trained_from: list[float] = []
    trained: list[float] = []
    for batch, (generating, training) in enumerate(zip(generation_s, training_s, strict=True)):
        needed = batch - 1 - staleness
        weights_s = trained[needed] if needed >= 0 else 0.0
        begun.append(max(made[-1] if made else 0.0, weights_s))
        made.append(begun[-1] + generating)
        trained_from.append(max(made[-1], trained[-1] if trained else 0.0))
        trained.append(trained_from[-1] + training)
    return PipelineTimes(
        generation_start_s=tuple(begun),
        generation_end_s=tuple(made),
        training_start_s=tuple(trained_from),
        training_end_s=tuple(trained),
    )


def bound(rollout_share: float, rollout_speedup: float) -> float:
    """Most that a step gains from a faster rollout (Amdahl): S <= 1 / (R / a + 1 - R)."""
    return 1.0 / (rollout_share / rollout_speedup + 1.0 - rollout_share)
