"""Step after step of a run: in turns, by phases of counts (`recorded`), or without a wait for the slowest (`free`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from policies.pipelining.free_admission import FreeAdmission
from policies.pipelining.phase_plan import PhasePlan
from policies.simulate.free_schedule import Update, play_free
from policies.simulate.performance.rollout_player import RolloutPlayer
from policies.simulate.performance.simulated_work import num_free_batches
from policies.simulate.simulation_records import Samples

Schedule = Literal["recorded", "free"]


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
