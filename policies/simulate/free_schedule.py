"""A run whose instances never wait for the slowest sample: batches run into one another (`rollout.schedule: free`).

Samples of batch b may begin once version b - K is in the instances; batch b is learned from when it is whole and the
trainer has ended with the one before. When an update ends, every open response is cut wherever it is, the new weights
are loaded, its caches are computed anew, and it goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from policies.reallocation.pool_records import ReallocationPolicy
from policies.simulate.simulated_pool import Kind
from policies.simulate.simulation import RolloutSimulation
from policies.simulate.simulation_records import Binding, PoolSetup, Samples, SimulationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What the trainer does, and how far samples may be behind it."""

    training_s: tuple[float, ...]
    "of each batch"
    other_s: float
    "between a batch's last sample and its update"
    publication_s: float
    staleness: int
    "K, at least 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeRun:
    """What came out."""

    result: SimulationResult
    loaded_s: tuple[float, ...]
    "of each batch: when the version that it made was in the instances"
    busy_s: tuple[float, ...]
    "of each batch: seconds for which an instance had worked by then, on average"
    begun_version: tuple[int, ...]
    "of each sample: the version that it began with"


def play_free(
    samples: Samples,
    *,
    batch: np.ndarray,
    setup: PoolSetup,
    policy: ReallocationPolicy,
    binding: Binding,
    update: Update,
    progress: Callable[[int], None] | None = None,
) -> FreeRun:
    """Play all batches to the last update; `batch` is [n], the number of each sample's, ascending from 0."""
    run = _FreeSimulation(samples, batch, setup, policy, binding, update, progress)
    result = run.run()
    return FreeRun(
        result=result,
        loaded_s=tuple(run.loaded_s),
        busy_s=tuple(run.busy_s),
        begun_version=tuple(run.begun_version.tolist()),
    )


class _FreeSimulation(RolloutSimulation):
    def __init__(
        self,
        samples: Samples,
        batch: np.ndarray,
        setup: PoolSetup,
        policy: ReallocationPolicy,
        binding: Binding,
        update: Update,
        progress: Callable[[int], None] | None,
    ) -> None:
        super().__init__(samples, setup, policy, binding, progress)
        self._batch, self._update = batch, update
        self._open = np.bincount(batch)
        "of each batch: samples that are not told of"
        for queue in self._queues:
            queue.clear()
        self._num_released = 0
        self._num_learned = 0
        self._is_training = False
        self.loaded_s: list[float] = []
        self.busy_s: list[float] = []
        self.begun_version = np.full(len(samples), -1)

    def _begin_run(self) -> None:
        self._release(0.0)
        self._share_machine(0.0)

    def _is_over(self) -> bool:
        return len(self.loaded_s) == len(self._open)

    def _release(self, now_s: float) -> None:
        """Let samples begin of every batch that the version in the instances is new enough for."""
        allowed = min(len(self.loaded_s) + self._update.staleness + 1, len(self._open))
        for batch in range(self._num_released, allowed):
            (mine,) = np.nonzero(self._batch == batch)
            for sample in mine.tolist():
                self._queues[sample % len(self._queues)].append(sample)
        self._num_released = allowed
        self._bind(now_s)

    def _give(self, sample: int, k: int, given: dict[int, list[int]]) -> None:
        self.begun_version[sample] = len(self.loaded_s)
        super()._give(sample, k, given)

    def _told(self, now_s: float, k: int, ended: list[int]) -> None:
        for sample in ended:
            self._open[self._batch[sample]] -= 1
        super()._told(now_s, k, ended)
        self._train(now_s)

    def _train(self, now_s: float) -> None:
        """Begin the update of the batch that is due, if it is whole."""
        due = self._num_learned
        if self._is_training or due == len(self._open) or self._open[due]:
            return
        self._is_training = True
        self._learn(now_s, self._update.training_s[due] + self._update.other_s)

    def _learned(self, now_s: float, expected: int) -> None:
        if expected != self._learning:
            return
        super()._learned(now_s, expected)
        for k, instance in enumerate(self._instances):
            instance.advance(now_s)
            instance.block(self._update.publication_s)
            for sample in instance.running:
                tokens = instance.context_of(sample)
                prompt_s = tokens * self._setup.prompt_token_s + self._setup.prompt_s
                instance.block(prompt_s * self._stretch)
            self._reschedule(k)
        self._push(now_s + self._update.publication_s, Kind.LOADED)

    def _loaded(self, now_s: float) -> None:
        self._num_learned += 1
        self._is_training = False
        for instance in self._instances:
            instance.advance(now_s)
        self.loaded_s.append(now_s)
        self.busy_s.append(float(np.mean([instance.busy_s for instance in self._instances])))
        self._release(now_s)
        self._train(now_s)
