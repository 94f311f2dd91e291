"""A training run on a cluster that is not here: rollouts under the project's policies, updates, publication, pipeline.

Every rollout is played twice, with what is configured and with plain decoding under the same policy: the speed-ups
are of one over the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings.simulated_cluster import SimulatedClusterConfig
from rlhfspec.policies.simulate.analytic_instance import Speculation
from rlhfspec.policies.simulate.described_cluster import DescribedCluster
from rlhfspec.policies.simulate.rollout_player import PlayedSteps, RolloutPlayer, num_free_batches
from rlhfspec.policies.simulate.simulation_records import SimulationResult
from rlhfspec.policies.simulate.training_cost import (
    MemoryFit,
    TrainingCost,
    memory_fit,
    publication_s,
    training_cost,
)
from rlhfspec.profiles.profile import Profile

MOST_SAMPLES = 20_000_000
"Of all rollouts together: an hour or two on one core."


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
    steps: PlayedSteps
    "one by one"

    def tree(self) -> dict[str, float]:
        """For JSON."""
        return {
            "rollout_s": self.rollout_s,
            "step_s": self.step_s,
            "trainer_idle": self.trainer_idle,
            "instances_idle": self.instances_idle,
            "moves": self.moves,
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
    played = [cluster.samples(step) for step in range(config.step.steps)]
    mean_tokens = float(np.mean([samples.context_tokens.mean() for samples in played]))
    tokens = float(np.mean([samples.context_tokens.sum() for samples in played]))
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

        def told(rollout: int, name: str = name) -> Callable[[int], None] | None:
            return None if progress is None else partial(progress, f"{name} {rollout}")

        player = RolloutPlayer(
            cluster, profile, speculation, slots=slots, mean_tokens=mean_tokens, earlier=earlier
        )
        made = player.steps(played, trained, published_s, told)
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


def simulate_rollout(cluster: DescribedCluster) -> SimulationResult:
    """Play the first step's rollout alone, with the configured drafts. Raises ConfigError as `simulate_cluster`."""
    samples = cluster.samples(0)
    mean_tokens = float(samples.context_tokens.mean())
    player = RolloutPlayer(
        cluster,
        None,
        "off" if cluster.instance.draft is None else cluster.config.drafter.policy,
        slots=cluster.slots(mean_tokens),
        mean_tokens=mean_tokens,
        earlier=cluster.samples(1).response_tokens,
    )
    return player.play(samples)


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


def _phase(made: PlayedSteps, rest_s: float) -> Phase:
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


def num_played(config: SimulatedClusterConfig) -> int:
    """Samples of all rollouts; each is played plainly, and once more where something drafts."""
    step = config.step
    is_free = step.staleness > 0 and step.schedule == "free"
    batches = num_free_batches(step.steps, step.staleness) if is_free else step.steps
    return config.lengths.samples * batches * (1 if config.drafter.kind == "none" else 2)


def require_bounded(configs: Sequence[SimulatedClusterConfig]) -> int:
    """Samples of all these simulations together. Raises ConfigError for more than anybody waits for."""
    total = sum(map(num_played, configs))
    if total > MOST_SAMPLES:
        largest = max(configs, key=num_played)
        among = f" in {len(configs)} combinations" if len(configs) > 1 else ""
        raise ConfigError(
            f"{total:,} samples would be played{among}, at most {largest.lengths.samples:,} lengths.samples x "
            f"{largest.step.steps} step.steps; expected at most {MOST_SAMPLES:,}, which take an hour or two: lower one "
            "of them, or try fewer combinations"
        )
    return total
