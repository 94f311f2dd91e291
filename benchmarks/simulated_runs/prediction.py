"""What the simulator says of a run, from what is no part of the figure: profile, lengths, seconds of other updates.

Generation is predicted from a profile that was measured before the run, and the lengths of its responses. Updates are
predicted from seconds a token of the *synchronous* run's odd iterations, which are not compared, their publication and
what else they did likewise: what a run ahead gains or loses beside its rollouts is the simulator's to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.simulated_runs.core_watch import Background
from benchmarks.simulated_runs.machine_profile import MachineProfile
from benchmarks.simulated_runs.recorded_run import Batch, RecordedRun
from rlhfspec.actors.generation.decode_loop import GATHER_S
from rlhfspec.core.settings.simulated_cluster import SimulatedClusterConfig
from rlhfspec.policies.simulate.cluster_simulation import simulate_cluster
from rlhfspec.policies.simulate.described_cluster import describe
from rlhfspec.policies.simulate.simulated_instance import SharedMachine

FORWARD_SHARE = 1 / 3
"Of a trained token's seconds: a forward's, as a backward pass is two of them."
MESSAGE_S = 1e-3
"A call between two actors of one machine."


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSeconds:
    """What is taken from a synchronous run."""

    token_s: float
    "of a trained token, as with nothing else busy"
    publication_s: float
    other_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One run beside its simulation; medians over the iterations that are compared."""

    name: str
    background: Background
    "cores that neither instances nor trainer kept busy"
    rollout_s: float
    simulated_rollout_s: float
    step_s: float
    simulated_step_s: float

    @property
    def rollout_deviation(self) -> float:
        """Simulated over measured, less one."""
        return self.simulated_rollout_s / self.rollout_s - 1.0

    @property
    def step_deviation(self) -> float:
        """The same of the step."""
        return self.simulated_step_s / self.step_s - 1.0


def shared(run: RecordedRun, machine: MachineProfile, cores: int) -> SharedMachine:
    """The machine as the run had it."""
    seen = run.background
    return SharedMachine(
        cores=cores, slowdown=machine.slowdown, background=seen.generating, resting=seen.resting
    )


def calibrated(run: RecordedRun, machine: SharedMachine) -> UpdateSeconds:
    """Take from a synchronous run what its odd iterations say; the even ones are compared."""
    odd = [number for number in run.compared if number % 2]
    trained = np.array([run.batches[number].trained_tokens for number in odd])
    return UpdateSeconds(
        token_s=float(np.median(run.update_s[odd] / trained)) / machine.factor(0, trainer=True),
        publication_s=float(np.median(run.seconds("publish")[odd])),
        other_s=float(np.median(run.other_s[odd])),
    )


def compare(
    name: str, run: RecordedRun, machine: MachineProfile, update: UpdateSeconds, *, cores: int
) -> Compared:
    """Simulate a run's iterations, and put the medians beside each other."""
    rollouts, steps = simulate(run, machine, update, cores=cores)
    kept = [number for number in run.compared if run.staleness or not number % 2]

    def middle(values: Sequence[float] | np.ndarray) -> float:
        return float(np.median([values[number] for number in kept]))

    return Compared(
        name=name,
        background=run.background,
        rollout_s=middle(run.seconds("generate")),
        simulated_rollout_s=middle(rollouts),
        step_s=middle(run.seconds("iteration")),
        simulated_step_s=middle(steps),
    )


def simulate(
    run: RecordedRun, machine: MachineProfile, update: UpdateSeconds, *, cores: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of every iteration's generation and of the iteration."""
    config = run.config
    generation = config.cluster.generation
    described = describe(
        SimulatedClusterConfig.model_validate(
            {
                "pools": {
                    "instances": generation.num_actors,
                    "trainer_gpus": 1,
                    "slots": config.engine.max_running_samples,
                    "report_s": GATHER_S,
                    "message_s": MESSAGE_S,
                    "cores": cores,
                    "core_slowdown": machine.slowdown,
                    "background": run.background.generating,
                    "resting_background": run.background.resting,
                },
                "lengths": {
                    "samples": len(run.batches[0].samples),
                    "max_new_tokens": config.sampling.max_new_tokens,
                },
                # the seconds of each batch are given below
                "learner": {"measured_s": 0.0},
                "step": {
                    "staleness": run.staleness,
                    "steps": len(run.batches),
                    "publication_s": update.publication_s,
                    "other_s": update.other_s,
                },
                "reallocation": {
                    "policy": config.reallocation.policy,
                    "poll_interval_s": config.reallocation.interval_s,
                },
            }
        )
    )
    described = replace(
        described,
        batches=tuple(batch.samples for batch in run.batches),
        training_s=tuple(update_s(run, batch, update) for batch in run.batches),
    )
    made = simulate_cluster(described, profile=machine.alone)
    phase = made.plain if config.speculation.policy == "off" else made.speculative
    return phase.steps.rollout_s, phase.steps.step_s


def update_s(run: RecordedRun, batch: Batch, update: UpdateSeconds) -> float:
    """Seconds of a batch's update with nothing beside it.

    Ahead of learning the trainer computes the old log-probabilities anew: a forward over all samples, but where a
    critic asks for one anyway.
    """
    more = run.staleness > 0 and run.config.algorithm.kind != "ppo"
    tokens = batch.trained_tokens + (FORWARD_SHARE * batch.tokens if more else 0.0)
    return update.token_s * tokens
