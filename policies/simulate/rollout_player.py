"""Plays the steps of a described cluster in one way to decode: the pool that its config stands for, and its trainer.

A step in turns is a rollout, then the update. With staleness a rollout is a phase of the run's `PhasePlan`, beside the
update (`recorded`), or batches run into one another (`free`): how many groups may have begun and which of those that
have ended an update learns from is `FreeAdmission`'s to say; when an update ends, every open response is cut wherever
it is, the new weights are loaded, its caches are computed anew, and it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhfspec.core.errors import ConfigError
from rlhfspec.policies.reallocation.by_name import make_reallocation_policy
from rlhfspec.policies.reallocation.pool_records import ReallocationPolicy
from rlhfspec.policies.reallocation.rate_curve import rate_curve_from_profile
from rlhfspec.policies.schedule.free import FreeAdmission
from rlhfspec.policies.schedule.recorded import PhasePlan
from rlhfspec.policies.simulate.analytic_instance import Speculation, last_step_tokens, prompt_cost
from rlhfspec.policies.simulate.compare import least_finish_s
from rlhfspec.policies.simulate.described_cluster import DescribedCluster
from rlhfspec.policies.simulate.simulated_pool import Kind, SimulatedPool, simulate
from rlhfspec.policies.simulate.simulation_records import Binding, PoolSetup, Samples, SimulationResult
from rlhfspec.profiles.profile import Profile

POLLS = 200
"Of a rollout, where no interval is given."
MOST_POLLS = 100_000
LEAST_FREE = 6
"Batches that a free schedule plays at least, those that fill and empty it aside."
Told = Callable[[int], Callable[[int], None] | None]
"Of the number of a rollout, from 1 on: what is told how many of its samples are done."


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedSteps:
    """One entry a step, of a run that has been going for a while."""

    rollout_s: tuple[float, ...]
    "of what was decoded in it; with `free`, for which an instance worked on average"
    step_s: tuple[float, ...]
    busy_s: float
    "of an instance, a step"
    moves: float


class RolloutPlayer:
    """Of one way to decode."""

    def __init__(
        self,
        cluster: DescribedCluster,
        profile: Profile | None,
        speculation: Speculation,
        *,
        slots: int,
        mean_tokens: float,
        earlier: np.ndarray,
    ) -> None:
        """Put one together.

        Args:
            cluster: the parts.
            profile: measured costs and acceptance, instead of the data sheet's.
            speculation: how it drafts.
            slots: samples that run at once on an instance.
            mean_tokens: of a sample at its end, its prompt included.
            earlier: lengths that policies have seen before.
        """
        self._cluster, self._profile, self._speculation = cluster, profile, speculation
        self._slots, self._earlier = slots, earlier
        prompt = cluster.config.lengths.prompt_tokens
        # on its way a sample has half of its response
        context = max(int(prompt + (mean_tokens - prompt) / 2), 1)
        if profile is not None:
            self._curve = rate_curve_from_profile(
                profile, context_tokens=context, speculation=speculation != "off"
            )
        else:
            self._curve = cluster.instance.rate_curve(
                context_tokens=context, max_samples=slots, speculation=speculation
            )
        if cluster.machine is not None:
            # a profile is of an instance that is alone
            self._curve.factor /= cluster.machine.factor(cluster.config.pools.instances)

    def play(
        self, samples: Samples, *, learner_s: float = 0.0, progress: Callable[[int], None] | None = None
    ) -> SimulationResult:
        """Play one rollout, with an update beside it on the same machine or elsewhere.

        Raises ConfigError where polls are absurdly many.
        """
        setup = replace(self._setup(samples), learner_s=learner_s)
        return simulate(self._own(samples), setup, self._policy(), binding=self._binding, progress=progress)

    def steps(
        self, batches: Sequence[Samples], training_s: Sequence[float], publication_s: float, told: Told
    ) -> PlayedSteps:
        """Play the batches, which come again and again; step i learns from batch i, in `training_s[i]`."""
        step = self._cluster.config.step
        after_s = publication_s + step.other_s
        if step.staleness and step.schedule == "free":
            return self._freely(batches, training_s, after_s, told)
        machine, longest = self._cluster.machine, max(int(one.response_tokens.max()) for one in batches)
        alone = 1.0 if machine is None else machine.factor(0, trainer=True)
        limit = max(longest, self._cluster.config.lengths.max_new_tokens)
        made, steps = [], []
        for number, update_s in enumerate(training_s):
            progress = told(number + 1)
            if not step.staleness:
                made.append(self.play(batches[number], progress=progress))
                steps.append(made[-1].finish_s + update_s * alone + after_s)
                continue
            # the first phases of a run would have less to go on with
            phase = number + step.staleness * len(batches)
            samples = phase_samples(batches, phase, staleness=step.staleness, max_new_tokens=limit)
            made.append(self.play(samples, learner_s=update_s, progress=progress))
            steps.append(max(made[-1].finish_s, made[-1].learner_end_s) + after_s)
        return PlayedSteps(
            rollout_s=tuple(one.finish_s for one in made),
            step_s=tuple(steps),
            busy_s=float(np.mean([one.busy_s.mean() for one in made])),
            moves=float(np.mean([one.num_moves for one in made])),
        )

    def _freely(
        self, batches: Sequence[Samples], training_s: Sequence[float], after_s: float, told: Told
    ) -> PlayedSteps:
        step, size = self._cluster.config.step, self._cluster.config.lengths.group_samples
        count = num_free_batches(len(batches), step.staleness)
        numbers = [number % len(batches) for number in range(count)]
        samples = joined([self._own(batches[number]) for number in numbers])
        run = FreeRun(
            samples,
            size,
            FreeAdmission(
                max_staleness=step.staleness,
                over_provisioning=step.over_provisioning or 1.0,
                groups_per_batch=len(batches[0]) // size,
                num_iterations=count,
            ),
            setup=self._setup(samples),
            policy=self._policy(),
            binding=self._binding,
            update_s=np.concatenate([_by_tokens(batches[n], training_s[n]) for n in numbers]),
            pause_s=after_s,
            progress=told(1),
        )
        moves = run.run().num_moves
        # the first batches fill the pipeline, the last ones have nothing behind them
        first, last = step.staleness, count - step.staleness - 2
        steps, busy = (np.diff(times)[first:last] for times in (run.loaded_s, run.busy_s))
        return PlayedSteps(
            rollout_s=tuple(busy.tolist()),
            step_s=tuple(steps.tolist()),
            busy_s=float(busy.mean()),
            moves=moves / count,
        )

    @property
    def _binding(self) -> Binding:
        return "static" if self._cluster.config.reallocation.policy == "static" else "pull"

    def _own(self, samples: Samples) -> Samples:
        """The samples as they decode here: without drafts none is faster than another."""
        if self._speculation != "off":
            return samples
        return replace(samples, speed=np.ones(len(samples)))

    def _setup(self, samples: Samples) -> PoolSetup:
        """The pool for these samples. Raises ConfigError where polls are absurdly many."""
        config, profile, machine = self._cluster.config, self._profile, self._cluster.machine
        pools, polls_s = config.pools, config.reallocation.poll_interval_s
        prompt_s, token_s, wasted = 0.0, self._cluster.instance.target.prefill_token_s(), 0.0
        if profile is not None:
            slower = 1.0 if machine is None else machine.factor(pools.instances)
            prompt_tokens = round(float(samples.prompt_tokens.mean()))
            prompt_s, token_s = (slower * cost for cost in prompt_cost(profile.cost, prompt_tokens))
            if self._speculation != "off":
                context = round(float(samples.context_tokens.mean()))
                wasted = last_step_tokens(profile, samples=self._slots, context_tokens=context)
        setup = PoolSetup(
            num_instances=pools.instances,
            num_slots=self._slots,
            curve=self._curve,
            max_new_tokens=int(samples.response_tokens.max()),
            moves=self._cluster.moves(prompt_s=prompt_s, prompt_token_s=token_s),
            prompt_s=prompt_s,
            prompt_token_s=token_s,
            last_step_tokens=wasted,
            report_interval_s=pools.report_s,
            message_s=pools.message_s,
            machine=machine,
        )
        least_s = least_finish_s(samples, setup)
        polls_s = max(least_s / POLLS, 1e-3) if polls_s is None else polls_s
        require_few_polls(polls_s, least_s)
        return replace(setup, poll_interval_s=polls_s)

    def _policy(self) -> ReallocationPolicy | None:
        """What moves samples; it starts afresh, and knows what moves take."""
        return make_reallocation_policy(
            self._cluster.config.reallocation.policy,
            curve=self._curve.copy(),
            gate=self._cluster.moves().gate(),
            earlier_lengths=self._earlier.tolist(),
        )


def require_few_polls(poll_interval_s: float, least_s: float) -> None:
    """Raise ConfigError where a rollout that takes at least `least_s` would be looked at absurdly often."""
    if least_s / poll_interval_s > MOST_POLLS:
        raise ConfigError(
            f"reallocation.poll_interval_s {poll_interval_s:g} would look {least_s / poll_interval_s:,.0f} times at a "
            f"rollout of {least_s:.0f} s; expected at most {MOST_POLLS:,} looks: leave it out for {POLLS} of them"
        )


def num_free_batches(steps: int, staleness: int) -> int:
    """Batches that a free schedule plays for so many steps."""
    return max(LEAST_FREE, steps) + 2 * (staleness + 1)


class FreeRun(SimulatedPool):
    """A run whose instances never wait for the slowest sample (`rollout.schedule: free`)."""

    def __init__(
        self,
        samples: Samples,
        group_samples: int,
        admission: FreeAdmission,
        *,
        setup: PoolSetup,
        policy: ReallocationPolicy | None,
        binding: Binding,
        update_s: np.ndarray,
        pause_s: float,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """A run to its last update.

        Args:
            samples: of all groups of the run, those of a group behind one another.
            group_samples: of a group.
            admission: of the run.
            setup: the pool.
            policy: asked at every poll; None moves nothing.
            binding: of samples to instances.
            update_s: [n] of each sample's share of an update, where nothing else is busy.
            pause_s: for which instances wait after an update: publication, and whatever else goes on.
            progress: told the number of finished samples at every poll.
        """
        super().__init__(samples, setup, policy, binding, progress)
        self._group_samples, self._admission = group_samples, admission
        self._update_s, self._pause_s = update_s, pause_s
        self._open: dict[int, int] = {}
        "group that has begun -> samples that are not told of"
        self._ended: list[int] = []
        "groups that are whole and not learned from, in the order in which they ended"
        self._is_training = False
        self.begun: list[int] = []
        "of each group: the version under which it began"
        self.learned: dict[int, int] = {}
        "of each group: the update that learned from it"
        self.loaded_s: list[float] = []
        "of each update: when its version was in the instances"
        self.busy_s: list[float] = []
        "of each update: seconds for which an instance had worked by then, on average"

    def _begin_run(self) -> None:
        self._begin_groups()

    def _is_over(self) -> bool:
        return len(self.loaded_s) == self._admission.num_iterations

    def _begin_groups(self) -> None:
        """Let as many begin as the version in the instances allows."""
        version, size = len(self.loaded_s), self._group_samples
        first, end = len(self.begun), self._admission.most_begun(version)
        self.begun += [version] * (end - first)
        self._open |= dict.fromkeys(range(first, end), size)
        if end > first:
            self._ask(range(first * size, end * size))

    def _delivered(self, sample: int) -> None:
        super()._delivered(sample)
        group = sample // self._group_samples
        self._open[group] -= 1
        if not self._open[group]:
            del self._open[group]
            self._ended.append(group)
        self._train()

    def _train(self) -> None:
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
        self._is_training = True
        self._learn(sum(float(self._update_s[g * size : (g + 1) * size].sum()) for g in chosen))

    def _learned(self, expected: int) -> None:
        if expected != self._learning:
            return
        super()._learned(expected)
        for instance in self._instances.values():
            instance.advance(self._now_s)
            instance.block(self._pause_s)
            for sample in instance.running:
                instance.block(self._prompt_s(sample, instance.context_of(sample)))
            self._reschedule(instance)
        self._at(self._now_s + self._pause_s, Kind.LOADED, self._loaded)

    def _loaded(self) -> None:
        self._is_training = False
        for instance in self._instances.values():
            instance.advance(self._now_s)
        self.loaded_s.append(self._now_s)
        self.busy_s.append(float(np.mean([instance.busy_s for instance in self._instances.values()])))
        self._begin_groups()
        self._train()


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


def _by_tokens(samples: Samples, seconds: float) -> np.ndarray:
    """[n] an update's seconds, spread over its samples."""
    tokens = samples.context_tokens.astype(float)
    return seconds * tokens / tokens.sum()
