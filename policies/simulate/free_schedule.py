"""A run whose instances never wait for the slowest sample: batches run into one another (`rollout.schedule: free`).

How many groups may have begun and which of those that have ended an update learns from is `FreeAdmission`'s to say, as
in a run. When an update ends, every open response is cut wherever it is, the new weights are loaded, its caches are
computed anew, and it goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from policies.pipelining.free_admission import FreeAdmission
from policies.reallocation.pool_records import ReallocationPolicy
from policies.simulate.simulated_pool import Kind
from policies.simulate.simulation import RolloutSimulation
from policies.simulate.simulation_records import Binding, PoolSetup, Samples, SimulationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What the trainer does, and what instances wait for after it."""

    sample_s: np.ndarray
    "[n] of each sample's share of an update, where nothing else is busy"
    pause_s: float
    "publication, and whatever else goes on while no sample is open"


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeRun:
    """What came out."""

    result: SimulationResult
    loaded_s: tuple[float, ...]
    "of each update: when its version was in the instances"
    busy_s: tuple[float, ...]
    "of each update: seconds for which an instance had worked by then, on average"
    begun: tuple[int, ...]
    "of each group: the version under which it began"
    learned: tuple[int, ...]
    "of each group: the update that learned from it"


def play_free(
    samples: Samples,
    *,
    group_samples: int,
    admission: FreeAdmission,
    setup: PoolSetup,
    policy: ReallocationPolicy,
    binding: Binding,
    update: Update,
    progress: Callable[[int], None] | None = None,
) -> FreeRun:
    """Play to the last update.

    Args:
        samples: of all groups of the run, those of a group behind one another.
        group_samples: of a group.
        admission: of the run.
        setup: the pool.
        policy: asked at every poll.
        binding: of samples to instances.
        update: seconds of it.
        progress: told the number of finished samples at every poll.
    """
    run = _FreeSimulation(samples, group_samples, admission, setup, policy, binding, update, progress)
    result = run.run()
    return FreeRun(
        result=result,
        loaded_s=tuple(run.loaded_s),
        busy_s=tuple(run.busy_s),
        begun=tuple(run.begun),
        learned=tuple(run.learned[group] for group in range(len(run.begun))),
    )


class _FreeSimulation(RolloutSimulation):
    def __init__(
        self,
        samples: Samples,
        group_samples: int,
        admission: FreeAdmission,
        setup: PoolSetup,
        policy: ReallocationPolicy,
        binding: Binding,
        update: Update,
        progress: Callable[[int], None] | None,
    ) -> None:
        super().__init__(samples, setup, policy, binding, progress)
        self._group_samples, self._admission, self._update = group_samples, admission, update
        for queue in self._queues:
            queue.clear()
        self._open: dict[int, int] = {}
        "group that has begun -> samples that are not told of"
        self._ended: list[int] = []
        "groups that are whole and not learned from, in the order in which they ended"
        self._is_training = False
        self.begun: list[int] = []
        self.learned: dict[int, int] = {}
        self.loaded_s: list[float] = []
        self.busy_s: list[float] = []

    def _begin_run(self) -> None:
        self._begin_groups(0.0)
        self._share_machine(0.0)

    def _is_over(self) -> bool:
        return len(self.loaded_s) == self._admission.num_iterations

    def _begin_groups(self, now_s: float) -> None:
        """Let as many begin as the version in the instances allows."""
        version, size = len(self.loaded_s), self._group_samples
        for group in range(len(self.begun), self._admission.most_begun(version)):
            self.begun.append(version)
            self._open[group] = size
            for sample in range(group * size, (group + 1) * size):
                self._queues[sample % len(self._queues)].append(sample)
        self._bind(now_s)

    def _told(self, now_s: float, k: int, ended: list[int]) -> None:
        for sample in ended:
            group = sample // self._group_samples
            self._open[group] -= 1
            if not self._open[group]:
                del self._open[group]
                self._ended.append(group)
        super()._told(now_s, k, ended)
        self._train(now_s)

    def _train(self, now_s: float) -> None:
        """Begin the next update, if there is enough to learn from."""
        due = len(self.loaded_s)
        if self._is_training or due == self._admission.num_iterations:
            return
        ended = [self.begun[group] for group in self._ended]
        places = self._admission.choose(ended, [self.begun[group] for group in self._open], due)
        if places is None:
            return
        chosen = [self._ended[place] for place in places]
        self._ended = [group for group in self._ended if group not in chosen]
        self.learned |= dict.fromkeys(chosen, due)
        size = self._group_samples
        seconds = sum(
            float(self._update.sample_s[group * size : (group + 1) * size].sum()) for group in chosen
        )
        self._is_training = True
        self._learn(now_s, seconds)

    def _learned(self, now_s: float, expected: int) -> None:
        if expected != self._learning:
            return
        super()._learned(now_s, expected)
        for k, instance in enumerate(self._instances):
            instance.advance(now_s)
            instance.block(self._update.pause_s)
            for sample in instance.running:
                tokens = instance.context_of(sample)
                prompt_s = tokens * self._setup.prompt_token_s + self._setup.prompt_s
                instance.block(prompt_s * self._stretch)
            self._reschedule(k)
        self._push(now_s + self._update.pause_s, Kind.LOADED)

    def _loaded(self, now_s: float) -> None:
        self._is_training = False
        for instance in self._instances:
            instance.advance(now_s)
        self.loaded_s.append(now_s)
        self.busy_s.append(float(np.mean([instance.busy_s for instance in self._instances])))
        self._begin_groups(now_s)
        self._train(now_s)
