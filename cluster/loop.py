"""The RL loop on one page: sample, score, update, publish, refit; synchronous, streamed, exactly once.

cursor -> scheduler -> generation instances -> completions as they finish -> reward pool
       -> rollout buffer -> trainer -> weights by manifest -> generation instances
                                    -> draft model refit, its weights the same way
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import ray

from cluster.collect import collect
from cluster.forward_stream import Streamed
from cluster.placement.ray_session import ray_session, sigterm_exits
from cluster.preflight.inputs import Inputs
from cluster.recorder import Recorder
from cluster.refit_step import refit_draft
from cluster.reporting.console import Reporter
from cluster.reporting.iteration_metrics import iteration_figures
from cluster.run_folder.layout import RunDir
from cluster.run_folder.rollout_files import write_rollouts
from cluster.system import System, running_system
from cluster.weights.checkpoints import save_adapter, save_checkpoint
from core.config import Config
from core.errors import NumericsError, StorageError
from core.metrics import MetricsLog

BY_SIGTERM = "stopped by SIGTERM (ray job stop, or kill)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """What the run ends with."""

    num_iterations: int
    weight_version: int
    parameter_checksum: str
    "of the trained target; equal runs end with equal checksums"


def run_training(config: Config, inputs: Inputs, run_dir: RunDir, report: Reporter) -> TrainingResult:
    """Train from a config whose model names are resolved, into the run folder.

    Raises InputError for what the user can mend, other RlhfSpecErrors for what failed on the way.
    """

    def interrupted() -> None:
        run_dir.set_status("interrupted", BY_SIGTERM)

    with (
        run_dir.heartbeat(),
        sigterm_exits(interrupted),
        ray_session(
            config, run_dir.path.name, on_sigterm=interrupted, store_bytes=inputs.object_store_bytes
        ) as session,
    ):
        for line in session.swept:
            report.note(line)
        if session.dashboard_url:
            report.note(f"dashboard {session.dashboard_url}")
        with running_system(config, session, inputs, note=report.note) as system:
            train(system, run_dir, report)
    manifest = system.target.manifest
    report.note(f"parameter checksum {manifest.checksum} (weight version {manifest.weight_version})")
    return TrainingResult(
        num_iterations=config.run.iterations,
        weight_version=manifest.weight_version,
        parameter_checksum=manifest.checksum,
    )


def train(system: System, run_dir: RunDir, report: Reporter) -> None:
    """Run every iteration, writing metrics, rollouts, moves and checkpoints as they come; a timeline at the end."""
    run = system.config.run
    metrics = MetricsLog(run_dir.metrics_file)
    recorder = Recorder(run_dir, report, step_log=run.step_log)
    report.on_progress = run_dir.progress
    report.start(run.iterations)
    try:
        for iteration in range(run.iterations):
            try:
                figures = run_iteration(system, iteration, run_dir, report, recorder)
            except NumericsError as error:
                raise type(error)(f"iteration {iteration + 1} of {run.iterations}: {error}") from error
            metrics.write(iteration, figures)
            report.iteration(iteration, figures)
            if run.checkpoint_every and (iteration + 1) % run.checkpoint_every == 0:
                save_checkpoints(system, run_dir, iteration=iteration)
        save_checkpoints(system, run_dir)
    except (StorageError, SystemExit):
        # a full disk has no room for pictures, and SIGTERM leaves no time for them
        raise
    except BaseException:
        recorder.write_timeline()
        raise
    recorder.write_timeline()


def run_iteration(
    system: System, iteration: int, run_dir: RunDir, report: Reporter, recorder: Recorder
) -> dict[str, float]:
    """Sample, score, update, publish, refit once; return the iteration's figures."""
    rollout = system.config.rollout
    requests = system.cursor.next_requests(
        rollout.prompts_per_iteration, rollout.samples_per_prompt, system.sampling
    )
    began_s = time.perf_counter()
    forwards = system.forward_stream(requests)
    collected = collect(system, requests, report, forwards)
    write_rollouts(run_dir.rollouts_file(iteration), collected.rollouts)
    moves = recorder.record(iteration, collected, system.generation.instances)

    update_began_s = time.perf_counter()
    report.progress("update", 0, 1)
    streamed = forwards.finish() if forwards is not None else Streamed()
    rollouts = ray.put(collected.rollouts)
    update = system.trainers.update(rollouts, recompute_old=system.recomputes_old)
    publish_began_s = time.perf_counter()
    report.progress("publish", 0, 1)
    instances = system.generation.instances
    broadcast = system.broadcast.publish(system.target, update.weight_version, instances)
    system.target = broadcast or system.trainers.take()
    (system.generation.keep if broadcast else system.generation.publish)(system.target)
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
        "iteration": ended_s - began_s,
    }
    figures = iteration_figures(collected.rollouts, collected.stats, update, seconds)
    figures["rollout/invariant"] = float(system.generation.is_invariant)
    return figures | streamed.figures() | moves | draft_figures | collected.environment


def save_checkpoints(system: System, run_dir: RunDir, *, iteration: int | None = None) -> None:
    """Save the trained target and the drafter as Hugging Face checkpoints, an adapter beside its merged target."""
    for model, weights in (("target", system.target), ("draft", system.draft)):
        if weights is not None:
            save_checkpoint(
                weights,
                system.tokenizer,
                run_dir.checkpoint_dir(model, iteration),
                dtype=system.config.models.dtype,
                timeout_s=system.config.cluster.order_timeout_s,
            )
    if system.config.trainer.lora is not None:
        save_adapter(
            system.trainers.adapter_files(),
            run_dir.checkpoint_dir("adapter", iteration),
            merged=system.target.manifest,
        )
