"""A training run on a cluster that is not here: rollouts under the project's policies, updates, publication, pipeline.

Every rollout is played twice, with what is configured and with plain decoding under the same policy: the speed-ups
are of one over the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np

from ...core.errors import ConfigError
from ...core.settings.simulated_cluster import SimulatedClusterConfig
from ...profiles.profile import Profile
from ..reallocation.by_name import make_reallocation_policy
from ..reallocation.pool_records import ReallocationPolicy
from ..reallocation.rate_curve import rate_curve_from_profile
from ..scheduling.look_ahead import CHAIN, LookAheadLaw, rows_of_profile
from ..staleness.free import Free, FreeAdmission
from ..staleness.in_turns import InTurns
from ..staleness.recorded import PhasePlan, Recorded
from ..staleness.rollout_schedule import Schedule
from .analytic_instance import Speculation, last_step_tokens, profiled_choice, prompt_cost
from .attempting_pool import LookAhead
from .compare import least_finish_s
from .described_cluster import DescribedCluster
from .scheduled_run import Batches, simulate_phases
from .simulated_pool import simulate
from .simulation_records import Binding, PoolSetup, Samples, SimulationResult
from .training_cost import (
    MemoryFit,
    TrainingCost,
    memory_fit,
    publication_s,
    training_cost,
)

POLLS = 200
"Of a rollout, where no interval is given."
MOST_POLLS = 100_000
LEAST_FREE = 6
"Batches that a free schedule plays at least, those that fill and empty it aside."
Progress = Callable[[int], Callable[[int], None] | None]
"Of the number of a rollout, from 1 on: what is told how many of its samples are done."
LEAST_AHEAD = 2
"Batches that a run that looks ahead plays at least before those that are looked at."
MOST_SAMPLES = 20_000_000
"Of all rollouts together: an hour or two on one core."


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSteps:
    """One entry a step, of a run that has been going for a while."""

    rollout_s: tuple[float, ...]
    "of what was decoded in it; with `free`, for which an instance worked on average"
    step_s: tuple[float, ...]
    busy_s: float
    "of an instance, a step"
    moves: float
    attempted_tokens: float = 0.0
    "of a step"
    proved_tokens: float = 0.0
    "of a step, those of them that were the samples' own"
    why_attempted: str = ""
    "what the law of look-ahead says of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A run of many steps, with speculation or without."""

    rollout_s: float
    "mean of the rollouts"
    step_s: float
    trainer_idle: float
    "share of the time"
    instances_idle: float
    "share of the time, of all instances"
    moves: float
    "of a step"
    steps: SimulatedSteps
    "one by one"

    def tree(self) -> dict[str, float]:
        """For JSON."""
        ahead = {name: getattr(self.steps, name) for name in ("attempted_tokens", "proved_tokens")}
        return {
            "rollout_s": self.rollout_s,
            "step_s": self.step_s,
            "trainer_idle": self.trainer_idle,
            "instances_idle": self.instances_idle,
            "moves": self.moves,
            **(ahead if self.steps.why_attempted else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResult:
    """What came out."""

    speculative: Phase
    plain: Phase
    training: TrainingCost
    publication_s: float
    other_s: float
    slots: int
    memory: MemoryFit
    mean_tokens: float
    "of a sample, its prompt included"
    tokens: float
    "of a step, prompts included"
    levels: tuple[tuple[int, int], ...]
    "levels of the chain that is chosen for 1, 2, 4, .. samples; of a fixed draft its own; empty without a drafter"

    @property
    def rollout_speedup(self) -> float:
        """Plain seconds of a rollout over those with drafts."""
        return self.plain.rollout_s / self.speculative.rollout_s

    @property
    def step_speedup(self) -> float:
        """Plain seconds of a step over those with drafts."""
        return self.plain.step_s / self.speculative.step_s

    @property
    def rollout_share(self) -> float:
        """Share of a plain step in turns that is rollout."""
        rest_s = self.training.total_s + self.publication_s + self.other_s
        return self.plain.rollout_s / (self.plain.rollout_s + rest_s)

    @property
    def step_bound(self) -> float:
        """Most that this speed-up of the rollout can bring a step whose parts take turns."""
        return bound(self.rollout_share, self.rollout_speedup)


class RolloutSimulation:
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
        context = self._context = max(int(prompt + (mean_tokens - prompt) / 2), 1)
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

    def simulate(self, samples: Samples) -> SimulationResult:
        """Play one rollout. Raises ConfigError where polls are absurdly many."""
        return simulate(self._own(samples), self._setup(samples), self._policy(), binding=self._binding)

    def steps(
        self,
        batches: Sequence[Samples],
        training_s: Sequence[float],
        publication_s: float,
        progress_of: Progress,
    ) -> SimulatedSteps:
        """Play the batches, which come again and again; step i learns from batch i, in `training_s[i]`."""
        step, size = self._cluster.config.step, self._cluster.config.lengths.group_samples
        own = Batches([self._own(batch) for batch in batches], training_s, group_samples=size)
        schedule, steps = self._schedule(own, batches)
        ahead = self._look_ahead()
        phases = simulate_phases(
            schedule,
            own,
            setup=self._setup,
            policy=self._policy,
            binding=self._binding,
            progress=progress_of,
            look_ahead=ahead,
        )
        made = [*islice(phases, steps.start, steps.stop)]
        busy_s = [float(phase.result.busy_s.mean()) for phase in made]
        return SimulatedSteps(
            rollout_s=tuple(
                busy_s if schedule.ends_with_update else [phase.result.finish_s for phase in made]
            ),
            step_s=tuple(phase.seconds + publication_s + step.other_s for phase in made),
            busy_s=float(np.mean(busy_s)),
            moves=float(np.mean([phase.result.num_moves for phase in made])),
            attempted_tokens=float(np.mean([phase.attempts.num_attempted_tokens for phase in made])),
            proved_tokens=float(np.mean([phase.attempts.num_proved_tokens for phase in made])),
            why_attempted="" if ahead is None else ahead.law.why(),
        )

    def _look_ahead(self) -> LookAhead | None:
        """How the run begins batches ahead; None: it does not."""
        config, instance, slots = self._cluster.config, self._cluster.instance, self._slots
        step, pools, machine, context = config.step, config.pools, self._cluster.machine, self._context
        if step.look_ahead == "off":
            return None
        if self._profile is None:
            counts = np.arange(1, slots + 1)
            plain, verified = (
                np.array(
                    [instance.target.forward_s(count, rows, count * context) for count in counts.tolist()]
                )
                for rows in (1.0, CHAIN + 1.0)
            )
            row_s = (verified - plain) / (CHAIN * counts)
            tokens = instance.step_tokens(slots, slots * context, self._speculation)
        else:
            measured = rows_of_profile(self._profile, context_tokens=context)
            row_s = np.pad(measured, (0, max(slots - len(measured), 0)), mode="edge")[:slots]
            row_s = row_s * (1.0 if machine is None else machine.factor(pools.instances))
            choice, _ = profiled_choice(self._profile, samples=slots, context_tokens=context)
            tokens = choice.tokens if self._speculation != "off" else 1.0
        most = None if step.look_ahead == "auto" else step.look_ahead
        is_shared = pools.colocated or machine is not None
        return LookAhead(
            law=LookAheadLaw(self._curve.copy(), row_s, most=most, is_shared=is_shared),
            agreement_tokens=step.agreement_tokens,
            row_s=row_s,
            step_tokens=tokens,
            # an engine that shares the trainer's GPUs has given its memory to it
            beside_s=None if pools.colocated else step.other_s,
            seed=config.lengths.seed,
        )

    def _schedule(self, own: Batches, batches: Sequence[Samples]) -> tuple[Schedule, range]:
        """The run's schedule, and its steps that are looked at."""
        step, lengths, count = self._cluster.config.step, self._cluster.config.lengths, len(batches)
        if not step.staleness:
            first = num_ahead(self._cluster.config)
            # one more than are looked at: the last begins another's batch too
            schedule = InTurns(own.next_batch, num_iterations=first + count + 1, peek=own.peek)
            return schedule, range(first, first + count)
        if step.schedule == "free":
            # the first batches fill the pipeline, the last ones have nothing behind them
            num_batches, first = num_free_batches(count, step.staleness), step.staleness + 1
            admission = FreeAdmission(
                max_staleness=step.staleness,
                over_provisioning=step.over_provisioning or 1.0,
                groups_per_batch=len(batches[0]) // lengths.group_samples,
                num_iterations=num_batches,
            )
            return Free(admission, own.next_groups), range(first, num_batches - first)
        plan = PhasePlan(
            max_staleness=step.staleness,
            weight_load="reprefill",
            max_new_tokens=own.limit,
            num_iterations=count + step.staleness + 1,
        )
        return Recorded(plan, own.next_batch), range(count)

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


def simulate_cluster(
    cluster: DescribedCluster,
    *,
    profile: Profile | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> ClusterResult:
    """Play the steps.

    Args:
        cluster: the parts.
        profile: measured costs and acceptance, for decoding, instead of the data sheet's.
        progress: told the rollout, such as "plain 1", and how many of its samples are done.

    Raises ConfigError where an instance has no room for a sample, or polls are absurdly many.
    """
    config, target = cluster.config, cluster.instance.target
    draft = None if cluster.instance.draft is None else cluster.instance.draft.roofline
    batches = [cluster.samples(step) for step in range(config.step.steps)]
    mean_tokens = float(np.mean([samples.context_tokens.mean() for samples in batches]))
    tokens = float(np.mean([samples.context_tokens.sum() for samples in batches]))
    slots = cluster.slots(mean_tokens)
    training = _training(cluster, tokens=tokens, mean_tokens=mean_tokens)
    published_s = _publication(cluster)
    given = cluster.training_s or (training.total_s,)
    trained = [given[step % len(given)] for step in range(config.step.steps)]
    kinds: dict[str, Speculation] = {"plain": "off"}
    if draft is not None:
        kinds["speculative"] = config.drafter.policy
    earlier = cluster.samples(config.step.steps).response_tokens
    phases = {}
    for name, speculation in kinds.items():

        def progress_of(rollout: int, name: str = name) -> Callable[[int], None] | None:
            return None if progress is None else partial(progress, f"{name} {rollout}")

        simulation = RolloutSimulation(
            cluster, profile, speculation, slots=slots, mean_tokens=mean_tokens, earlier=earlier
        )
        made = simulation.steps(batches, trained, published_s, progress_of)
        phases[name] = _phase(made, float(np.mean(trained)) + published_s + config.step.other_s)
    return ClusterResult(
        speculative=phases.get("speculative", phases["plain"]),
        plain=phases["plain"],
        training=training,
        publication_s=published_s,
        other_s=config.step.other_s,
        slots=slots,
        memory=memory_fit(
            target,
            draft,
            slots=slots,
            context_tokens=mean_tokens,
            spare_memory=config.device.spare_memory,
            trainer_gpus=config.pools.trainer_gpus,
            sharded=config.learner.sharded,
        ),
        mean_tokens=mean_tokens,
        tokens=tokens,
        levels=_levels(cluster, slots, mean_tokens) if profile is None else (),
    )


def _training(cluster: DescribedCluster, *, tokens: float, mean_tokens: float) -> TrainingCost:
    config = cluster.config
    measured_s = config.learner.measured_s
    if cluster.training_s:
        measured_s = float(np.mean(cluster.training_s))
    if measured_s is not None:
        return TrainingCost(log_probability_s=0.0, update_s=measured_s, compute_s=measured_s, traffic_s=0.0)
    return training_cost(
        cluster.target,
        cluster.instance.target.sheet,
        config.learner,
        gpus=config.pools.trainer_gpus,
        tokens=tokens,
        mean_tokens=mean_tokens,
        link_share=config.device.link_share,
    )


def _publication(cluster: DescribedCluster) -> float:
    config = cluster.config
    if config.step.publication_s is not None:
        return config.step.publication_s
    return publication_s(
        cluster.instance.target.weight_bytes_per_gpu,
        sheet=cluster.instance.target.sheet,
        link_share=config.device.link_share,
        colocated=config.pools.colocated,
    )


def _phase(made: SimulatedSteps, rest_s: float) -> Phase:
    step_s = float(np.mean(made.step_s))
    return Phase(
        rollout_s=float(np.mean(made.rollout_s)),
        step_s=step_s,
        trainer_idle=max(1.0 - rest_s / step_s, 0.0),
        instances_idle=max(1.0 - made.busy_s / step_s, 0.0),
        moves=made.moves,
        steps=made,
    )


def _levels(cluster: DescribedCluster, slots: int, mean_tokens: float) -> tuple[tuple[int, int], ...]:
    draft = cluster.instance.draft
    if draft is None:
        return ()
    batches = [2**power for power in range(slots.bit_length())]
    if cluster.config.drafter.policy == "fixed":
        return tuple((batch, draft.levels) for batch in batches)
    context = mean_tokens / 2
    return tuple((batch, cluster.instance.best_chain(batch, batch * context)[0]) for batch in batches)


def bound(rollout_share: float, rollout_speedup: float) -> float:
    """Most that a step gains from a faster rollout (Amdahl): S <= 1 / (R / a + 1 - R)."""
    return 1.0 / (rollout_share / rollout_speedup + 1.0 - rollout_share)


def num_simulated(config: SimulatedClusterConfig) -> int:
    """Samples of all rollouts; each is played plainly, and once more where something drafts."""
    step = config.step
    is_free = step.staleness > 0 and step.schedule == "free"
    batches = num_free_batches(step.steps, step.staleness) if is_free else step.steps + num_ahead(config)
    return config.lengths.samples * batches * (1 if config.drafter.kind == "none" else 2)


def require_bounded(configs: Sequence[SimulatedClusterConfig]) -> int:
    """Samples of all these simulations together. Raises ConfigError for more than anybody waits for."""
    total = sum(map(num_simulated, configs))
    if total > MOST_SAMPLES:
        largest = max(configs, key=num_simulated)
        among = f" in {len(configs)} combinations" if len(configs) > 1 else ""
        raise ConfigError(
            f"{total:,} samples would be played{among}, at most {largest.lengths.samples:,} lengths.samples x "
            f"{largest.step.steps} step.steps; expected at most {MOST_SAMPLES:,}, which take an hour or two: lower one "
            "of them, or try fewer combinations"
        )
    return total


def num_ahead(config: SimulatedClusterConfig) -> int:
    """Batches before those that are looked at: whole passes over all, until each has what the one before attempted."""
    step = config.step
    return 0 if step.look_ahead == "off" else -(-LEAST_AHEAD // step.steps) * step.steps


def num_free_batches(steps: int, staleness: int) -> int:
    """Batches that a free schedule plays for so many steps."""
    return max(LEAST_FREE, steps) + 2 * (staleness + 1)
