"""Hands blocks of scored samples to the trainers while the rollout's tail still runs.

One order at a time: what the rollout does not outlast is left to the update, and whoever asks the trainer for
something else (a replacement's weights) waits for one block at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlhfspec.core.records import Rollout


class ForwardTrainers(Protocol):
    """The trainers, as the stream asks them (`cluster.system.trainer_pool.TrainerPool`)."""

    def begin_forwards(self, rollouts: Sequence[Rollout], *, recompute_old: bool) -> Any:
        """Order the forwards of one block; what to ask for them by."""
        ...

    def answered(self, order: Any) -> bool:
        """Whether an answer, or a failure, is there."""
        ...

    def end_forwards(self, order: Any) -> float:
        """Wait for them; seconds that they took."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """What was computed during a rollout."""

    num_samples: int = 0
    hidden_s: float = 0.0
    "seconds of forwards that the rollout hid: all of them but those that were still waited for at its end"

    def figures(self) -> dict[str, float]:
        """For `metrics.jsonl`."""
        return {
            "time/forwards_hidden_s": self.hidden_s,
            "rollout/num_streamed_samples": float(self.num_samples),
        }


class ForwardStream:
    """Of one iteration. Blocks are `block_samples` samples each, in the order of their index."""

    def __init__(
        self,
        trainers: ForwardTrainers,
        sample_indices: Sequence[int],
        *,
        block_samples: int,
        recompute_old: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        ordered = sorted(sample_indices)
        self._trainers, self._recompute_old, self._clock = trainers, recompute_old, clock
        self._block_of = {index: place // block_samples for place, index in enumerate(ordered)}
        self._missing = [
            len(ordered[start : start + block_samples]) for start in range(0, len(ordered), block_samples)
        ]
        self._blocks: list[list[Rollout]] = [[] for _ in self._missing]
        self._whole: list[int] = []
        self._order: Any = None
        self._computed_s = 0.0
        self._num_samples = 0

    def add(self, rollout: Rollout) -> None:
        """Take one scored sample."""
        block = self._block_of[rollout.completion.key.sample_index]
        self._blocks[block].append(rollout)
        self._missing[block] -= 1
        if not self._missing[block]:
            self._whole.append(block)

    def look(self) -> None:
        """Order the next whole block where the trainers are free.

        Raises what `end_forwards` raises: a trainer's death is named here, and not at the update.
        """
        if self._order is not None and self._trainers.answered(self._order):
            self._end()
        if self._order is None and self._whole:
            rollouts = self._blocks[self._whole.pop(0)]
            self._order = self._trainers.begin_forwards(rollouts, recompute_old=self._recompute_old)
            self._num_samples += len(rollouts)

    def finish(self) -> Streamed:
        """Wait for what is under way. Raises as `look`."""
        began_s = self._clock()
        if self._order is not None:
            self._end()
        waited_s = self._clock() - began_s
        return Streamed(num_samples=self._num_samples, hidden_s=max(0.0, self._computed_s - waited_s))

    def _end(self) -> None:
        order, self._order = self._order, None
        self._computed_s += self._trainers.end_forwards(order)
