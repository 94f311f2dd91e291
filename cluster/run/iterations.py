"""One iteration of the RL loop: sample, score, update, publish, refit; in turns, or with generation ahead of learning.

cursor -> scheduler -> generation instances -> completions as they finish -> reward pool
       -> rollout buffer -> trainer -> weights by manifest -> generation instances
                                    -> draft model refit, its weights the same way
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from rlhfspec.actors.waiting.watch import LOOK_S
from rlhfspec.cluster.folder.run_log import RunLog
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.observe.iteration_metrics import iteration_figures
from rlhfspec.cluster.observe.recorder import Recorder
from rlhfspec.cluster.run.collect import Collected, collect, receive_late
from rlhfspec.cluster.run.draft_step import refit_draft
from rlhfspec.cluster.run.pipeline import Pipeline
from rlhfspec.cluster.system.system import System
from rlhfspec.core.records import Rollout, SampleRequest, UpdateReport


def run_iteration(
    system: System, iteration: int, report: Reporter, recorder: Recorder, log: RunLog
) -> dict[str, float]:
    """Sample, score, update, publish, refit, each after the other; return the iteration's figures."""
    requests = next_batch(system)
    system.generation.rollouts_ahead(system.config.run.iterations - iteration - 1)
    began_s = time.perf_counter()
    groups = system.useful_groups(requests)
    collected = collect(system, requests, report, groups)
    log.rollouts(iteration, collected.rollouts)
    learned = collected.rollouts if groups is None else groups.batch(collected.rollouts)
    moves = recorder.record(
        iteration, collected, system.generation.instances, system.generation.final_reports()
    )

    update_began_s = time.perf_counter()
    report.progress("update", 0, 1)
    rollouts = ray.put(learned)
    _remember(system, iteration, collected.rollouts, may_come_again=groups is not None)
    system.is_learning = True
    update = system.trainers.update(rollouts, recompute_old=system.recomputes_old)
    _log_advantages(log, iteration, collected.rollouts, learned, update)
    publish_began_s = time.perf_counter()
    parts = _publish(system, update, report, log, may_broadcast=True)
    refit_began_s = time.perf_counter()
    report.progress("refit", 0, 1)
    draft_figures = refit_draft(system, rollouts, iteration_s=refit_began_s - began_s, report=report)
    ended_s = time.perf_counter()
    seconds = {
        "generate": collected.generate_s,
        "score": collected.score_s,
        "update": publish_began_s - update_began_s,
        "publish": refit_began_s - publish_began_s,
        "refit": ended_s - refit_began_s,
        "evaluate": 0.0,
        "iteration": ended_s - began_s,
    }
    figures = iteration_figures(collected.rollouts, collected.stats, update, seconds) | parts
    if groups is not None:
        figures |= groups.figures()
    kept = log.record(iteration, learned, update)
    return figures | _further_figures(system, collected) | moves | draft_figures | kept


def next_batch(system: System) -> list[SampleRequest]:
    """Take an iteration's requests from the cursor."""
    return next_prompts(system, system.config.rollout.prompts_per_iteration)


def next_prompts(system: System, num_prompts: int) -> list[SampleRequest]:
    """Take the requests of so many prompts from the cursor."""
    return system.cursor.next_requests(num_prompts, system.config.rollout.samples_per_prompt, system.sampling)


def run_pipelined_iteration(
    system: System, pipeline: Pipeline, iteration: int, report: Reporter, recorder: Recorder, log: RunLog
) -> dict[str, float]:
    """Update from a batch while the next ones are sampled; then publish and refit, with no sample open."""
    began_s = time.perf_counter()
    filled: Collected | None = None
    if pipeline.needs_filling(iteration):
        filled = _phase(system, pipeline, iteration - 1, report)
        recorder.pass_over(system.generation.instances)
    beside = _UpdateBeside(system, pipeline, iteration, log)
    collected = _phase(system, pipeline, iteration, report, beside)
    moves = recorder.record(
        iteration, collected, system.generation.instances, system.generation.final_reports()
    )

    waited_from_s = time.perf_counter()
    report.progress("update", 0, 1)
    update, learned = beside.wait(), beside.learned
    publish_began_s = time.perf_counter()
    phases = [collected] if filled is None else [filled, collected]
    late, num_late_skipped = receive_late(system, pipeline, report)
    _remember(system, iteration, [*(one for phase in phases for one in phase.rollouts), *late])
    _log_advantages(log, iteration, learned, learned, update)
    # a joiner may come while the trainer is further on: what instances decode from must be at hand
    parts = _publish(system, update, report, log, may_broadcast=False)
    refit_began_s = time.perf_counter()
    report.progress("refit", 0, 1)
    draft_figures = refit_draft(system, beside.batch, iteration_s=refit_began_s - began_s, report=report)
    ended_s = time.perf_counter()
    exposed_s = min(publish_began_s - waited_from_s, beside.seconds)
    seconds = {
        "generate": sum(phase.generate_s for phase in phases),
        "score": sum(phase.score_s for phase in phases),
        # seconds add up to those of the iteration: what the phase hid is told beside them
        "update": publish_began_s - waited_from_s,
        "publish": refit_began_s - publish_began_s,
        "refit": ended_s - refit_began_s,
        "evaluate": 0.0,
        "iteration": ended_s - began_s,
    }
    figures = iteration_figures(learned, collected.stats, update, seconds) | parts
    # of what was decoded here, which is not what was learned from here
    decoded = sum(phase.stats.num_emitted_tokens for phase in phases)
    figures["rollout/goodput_tokens_per_s"] = decoded / max(seconds["generate"], 1e-9)
    if not collected.stats.num_decode_steps:
        # the last update has nothing beside it
        for name in ("goodput_tokens_per_s", "mean_acceptance_length", "acceptance_rate"):
            del figures[f"rollout/{name}"]
    figures |= {
        "time/update_hidden_s": beside.seconds - exposed_s,
        "time/batch_wait_s": beside.began_s - began_s,
        "rollout/num_cut_samples": float(pipeline.num_cut),
        "rollout/num_unscored_samples": float(pipeline.num_unscored),
    }
    kept = log.record(iteration, learned, update)
    further = _further_figures(system, *phases)
    further["reward/num_skipped"] += num_late_skipped
    return figures | further | moves | draft_figures | kept


def _phase(
    system: System,
    pipeline: Pipeline,
    phase: int,
    report: Reporter,
    beside: _UpdateBeside | None = None,
) -> Collected:
    """Decode what a phase asks for; samples that are cut stay in the pipeline, and so does what waits for a reward."""
    # under a recorded schedule the last update has nothing beside it
    num_phases = pipeline.num_iterations - (0 if pipeline.ends_with_update else 1)
    system.generation.rollouts_ahead(max(num_phases - phase - 1, 0))
    return collect(
        system,
        pipeline.begin(phase),
        report,
        pipeline=pipeline,
        meanwhile=None if beside is None else beside.look,
        awaits_rewards=None if beside is None else beside.awaits_rewards,
    )


class _UpdateBeside:
    """The update of a batch beside a phase: it begins when the batch is whole, and may end the phase."""

    def __init__(self, system: System, pipeline: Pipeline, iteration: int, log: RunLog) -> None:
        self._system, self._pipeline, self._iteration, self._log = system, pipeline, iteration, log
        self._order: Mapping[str, Any] | None = None
        self._report: UpdateReport | None = None
        self.learned: list[Rollout] = []
        "once it has begun"
        self.batch: Any = None
        "the same in the object store"
        self.began_s = 0.0
        "by `time.perf_counter`, once it has"
        self.seconds = 0.0
        "until the trainers had answered, once they have"

    def look(self) -> None:
        """Begin where the batch is whole; take the report where it is there, and end the phase.

        Raises as `TrainerPool.update`: a dead or frozen trainer is told here.
        """
        if self._report is not None:
            return
        if self._order is None:
            if self._pipeline.has(self._iteration):
                self._begin()
        elif self._system.trainers.is_over(self._order):
            self._end(samples_are_open=True)
            if self._pipeline.ends_with_update:
                self._system.scheduler.cut()
        elif time.monotonic() - self._looked_s > LOOK_S:
            self._looked_s = time.monotonic()
            self._alive.look()

    def awaits_rewards(self) -> bool:
        """Whether it cannot begin before rewards are there that are being computed."""
        has_begun = self._order is not None or self._pipeline.has(self._iteration)
        return not has_begun and self._pipeline.num_unscored > 0

    def wait(self) -> UpdateReport:
        """Wait for the report. Raises as `TrainerPool.update`; WeightsError, RewardError: see `Pipeline.take`."""
        if self._order is None:
            self._begin()
        if self._report is None:
            self._end(samples_are_open=False)
        assert self._report is not None
        return self._report

    def _begin(self) -> None:
        trainers = self._system.trainers
        self.learned = self._pipeline.take(self._iteration)
        self.batch = ray.put(self.learned)
        self._system.is_learning, self.began_s = True, time.perf_counter()
        self._order = trainers.begin_update(self.batch, recompute_old=self._system.recomputes_old)
        self._alive, self._looked_s = trainers.heartbeat("update"), time.monotonic()
        self._log.rollouts(self._iteration, self.learned)

    def _end(self, *, samples_are_open: bool) -> None:
        assert self._order is not None
        self._report = self._system.trainers.end_update(self._order, samples_are_open=samples_are_open)
        self.seconds = time.perf_counter() - self.began_s


def _remember(
    system: System, iteration: int, rollouts: Sequence[Rollout], *, may_come_again: bool = False
) -> None:
    """Let drafters that look up have finished responses whose prompts come again."""
    config = system.config
    prompts_ahead = (config.run.iterations - iteration - 1) * config.rollout.prompts_per_iteration
    if config.speculation.remembers and (may_come_again or system.cursor.comes_again(prompts_ahead)):
        system.generation.remember(rollouts)


def _log_advantages(
    log: RunLog,
    iteration: int,
    rollouts: Sequence[Rollout],
    learned: Sequence[Rollout],
    update: UpdateReport,
) -> None:
    """Write the rollouts again: an update that fails must not take them with it, so they were written before."""
    advantages = dict(zip(map(id, learned), update.sample_advantages or (), strict=False))
    log.rollouts(iteration, rollouts, [advantages.get(id(rollout)) for rollout in rollouts])


def _publish(
    system: System, update: UpdateReport, report: Reporter, log: RunLog, *, may_broadcast: bool
) -> dict[str, float]:
    """Bring every instance the trainers' version; no sample is open. The figures of what it took."""
    report.progress("publish", 0, 1)
    instances = system.generation.instances
    broadcast = (
        system.broadcast.publish(system.target, update.weight_version, instances) if may_broadcast else None
    )
    system.target = broadcast or system.trainers.take()
    (system.generation.keep if broadcast else system.generation.publish)(system.target)
    log.weights(system.target.manifest)
    return {f"time/publish_{part}_s": seconds for part, seconds in system.target.part_seconds.items()}


def _further_figures(system: System, *phases: Collected) -> dict[str, float]:
    """Of the pool, the data and the environment, the last phase's."""
    return {
        "rollout/invariant": float(system.generation.is_invariant),
        "reward/num_skipped": float(sum(phase.num_skipped for phase in phases)),
        "data/epoch": system.cursor.num_passes,
        **phases[-1].environment,
        **system.generation.figures(),
    }
