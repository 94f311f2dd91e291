"""Step after step of a run: in turns, by phases of counts (`recorded`), or without a wait for the slowest (`free`).

In a free schedule batches run into one another: how many groups may have begun and which of those that have ended an
update learns from is `FreeAdmission`'s to say, as in a run. When an update ends, every open response is cut wherever it
is, the new weights are loaded, its caches are computed anew, and it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlhfspec.policies.pipelining.free_admission import FreeAdmission
from rlhfspec.policies.pipelining.phase_plan import PhasePlan
from rlhfspec.policies.reallocation.pool_records import ReallocationPolicy
from rlhfspec.policies.simulate.rollout_player import RolloutPlayer
from rlhfspec.policies.simulate.simulated_pool import Kind
from rlhfspec.policies.simulate.simulation import RolloutSimulation
from rlhfspec.policies.simulate.simulation_records import Binding, PoolSetup, Samples, SimulationResult

Schedule = Literal["recorded", "free"]
LEAST_FREE = 6
"Batches that a free schedule plays at least, those that fill and empty it aside."


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """What takes turns with generation, or goes on beside it."""

    training: Sequence[float]
    "of each batch"
    publication: float
    other: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What goes on beside what."""

    staleness: int
    "K; 0: in turns, whatever the schedule"
    schedule: Schedule = "recorded"
    over_provisioning: float | None = None
    "free: as of `rollout.over_provisioning`"
    group_samples: int = 1
    "free: samples of a prompt, which are learned from together"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedSteps:
    """One entry a step, of a run that has been going for a while."""

    rollout_s: tuple[float, ...]
    "of what was decoded in it; with `free`, for which an instance worked on average"
    step_s: tuple[float, ...]
    busy_s: float
    "of an instance, a step"
    moves: float


def play_steps(
    player: RolloutPlayer,
    batches: Sequence[Samples],
    seconds: StepSeconds,
    *,
    order: Order,
    told: Callable[[int], Callable[[int], None] | None],
) -> PlayedSteps:
    """Play the batches, which come again and again; step i learns from batch i.

    Args:
        player: of the rollouts.
        batches: of samples.
        seconds: of what else a step does.
        order: what goes on beside what.
        told: of the number of a rollout, from 1 on, what is told how many of its samples are done.
    """
    if not order.staleness:
        return _in_turns(player, batches, seconds, told)
    if order.schedule == "recorded":
        return _by_phases(player, batches, seconds, order.staleness, told)
    return _freely(player, batches, seconds, order, told)


def phase_samples(batches: Sequence[Samples], phase: int, *, staleness: int, max_new_tokens: int) -> Samples:
    """What a phase decodes of batches that come again and again: responses as far as the plan lets them.

    What is cut goes on with its context computed anew (`weight_load: reprefill`).
    """
    # far from the ends of the run
    plan = PhasePlan(
        max_staleness=staleness,
        weight_load="reprefill",
        max_new_tokens=max_new_tokens,
        num_iterations=phase + 2 * staleness + 2,
    )
    parts = []
    for batch in plan.batches(phase):
        whole = batches[batch % len(batches)]
        limit = plan.limit(batch, phase)
        done = plan.limit(batch, phase - 1) if batch in plan.batches(phase - 1) else 0
        is_open = whole.response_tokens > done
        parts.append(
            Samples(
                response_tokens=np.minimum(whole.response_tokens, limit)[is_open] - done,
                prompt_tokens=whole.prompt_tokens[is_open] + done,
                speed=whole.speed[is_open],
                # what goes on is like no other
                group=None if whole.group is None or done else whole.group[is_open],
            )
        )
    return joined(parts)


def joined(parts: Sequence[Samples]) -> Samples:
    """All of them in one, in this order; no group is in two of them."""
    groups, first = [], 0
    for part in parts:
        group = np.full(len(part), -1) if part.group is None else part.group
        groups.append(np.where(group >= 0, group + first, -1))
        first = max(first, int(groups[-1].max(initial=-1)) + 1)
    return Samples(
        response_tokens=np.concatenate([part.response_tokens for part in parts]),
        prompt_tokens=np.concatenate([part.prompt_tokens for part in parts]),
        speed=np.concatenate([part.speed for part in parts]),
        group=np.concatenate(groups),
    )


def _in_turns(
    player: RolloutPlayer,
    batches: Sequence[Samples],
    seconds: StepSeconds,
    told: Callable[[int], Callable[[int], None] | None],
) -> PlayedSteps:
    made = [player.play(samples, progress=told(step)) for step, samples in enumerate(batches, start=1)]
    return PlayedSteps(
        rollout_s=tuple(one.finish_s for one in made),
        step_s=tuple(
            one.finish_s + training_s * player.trainer_stretch + seconds.publication + seconds.other
            for one, training_s in zip(made, seconds.training, strict=True)
        ),
        busy_s=float(np.mean([one.busy_s.mean() for one in made])),
        moves=float(np.mean([one.num_moves for one in made])),
    )


def _by_phases(
    player: RolloutPlayer,
    batches: Sequence[Samples],
    seconds: StepSeconds,
    staleness: int,
    told: Callable[[int], Callable[[int], None] | None],
) -> PlayedSteps:
    longest = max(int(samples.response_tokens.max()) for samples in batches)
    max_new_tokens = max(longest, player.cluster.config.lengths.max_new_tokens)
    made, steps = [], []
    for step, training_s in enumerate(seconds.training):
        # the first phases of a run would have less to go on with
        phase = step + staleness * len(batches)
        samples = phase_samples(batches, phase, staleness=staleness, max_new_tokens=max_new_tokens)
        one = player.play(samples, learner_s=training_s, progress=told(step + 1))
        made.append(one)
        steps.append(max(one.finish_s, one.learner_end_s) + seconds.publication + seconds.other)
    return PlayedSteps(
        rollout_s=tuple(one.finish_s for one in made),
        step_s=tuple(steps),
        busy_s=float(np.mean([one.busy_s.mean() for one in made])),
        moves=float(np.mean([one.num_moves for one in made])),
    )


def _freely(
    player: RolloutPlayer,
    batches: Sequence[Samples],
    seconds: StepSeconds,
    order: Order,
    told: Callable[[int], Callable[[int], None] | None],
) -> PlayedSteps:
    count = num_free_batches(len(batches), order.staleness)
    numbers = [number % len(batches) for number in range(count)]
    samples = joined([player.own(batches[number]) for number in numbers])
    groups = len(batches[0]) // order.group_samples
    made = play_free(
        samples,
        group_samples=order.group_samples,
        admission=FreeAdmission(
            max_staleness=order.staleness,
            over_provisioning=order.over_provisioning or 1.0,
            groups_per_batch=groups,
            num_iterations=count,
        ),
        setup=player.setup(samples),
        policy=player.policy(),
        binding=player.binding,
        update=Update(
            sample_s=np.concatenate(
                [_by_tokens(batches[number], seconds.training[number]) for number in numbers]
            ),
            pause_s=seconds.publication + seconds.other,
        ),
        progress=told(1),
    )
    # the first batches fill the pipeline, the last ones have nothing behind them
    first, last = order.staleness, count - order.staleness - 2
    steps = np.diff(made.loaded_s)[first:last]
    busy = np.diff(made.busy_s)[first:last]
    return PlayedSteps(
        rollout_s=tuple(busy.tolist()),
        step_s=tuple(steps.tolist()),
        busy_s=float(busy.mean()),
        moves=made.result.num_moves / count,
    )


def _by_tokens(samples: Samples, seconds: float) -> np.ndarray:
    """[n] an update's seconds, spread over its samples."""
    tokens = (samples.prompt_tokens + samples.response_tokens).astype(float)
    return seconds * tokens / tokens.sum()


def num_free_batches(steps: int, staleness: int) -> int:
    """Batches that a free schedule plays for so many steps."""
    return max(LEAST_FREE, steps) + 2 * (staleness + 1)


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
