"""The RL loop: sample, score, update, publish, refit; in turns, or with generation ahead of learning.

cursor -> schedule -> scheduler -> generation instances -> completions as they finish -> reward pool
       -> schedule -> trainer -> weights by manifest -> generation instances
                             -> draft model refit, its weights the same way
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

from ...actors.remote.process_metrics import give_back_free_memory
from ...actors.remote.watch import watching
from ...core.errors import NumericsError, PlacementError, TrainerLost
from ...core.records import Rollout, UpdateReport
from ...core.weight_records import WeightManifest
from ..folder.layout import RunDir
from ..folder.run_status import STOPPING
from ..observe.console import START_UP_STAGES, Reporter
from ..observe.iteration_metrics import iteration_metrics, with_evaluation
from ..observe.outcome_checks import UNCHANGED
from ..observe.summary import signal_line, start_up_metrics, unread_line, with_signal
from ..plan.run_plan import RunPlan
from ..plan.run_profile import RunProfile
from ..ray_start.ray_session import RaySession, note_dashboard, ray_session, sigterm_exits
from ..resume.checkpoints import save_checkpoints
from ..resume.run_state import RunState
from ..resume.trainer_restarts import LOSSES, TrainerRestarts
from ..system.system import System, running_system
from .draft_step import refit_draft
from .lifetime import Run, ending_well, interrupts_between_updates
from .observer import Observer, observing
from .stream import Collected
from .update import Update

BY_SIGTERM = "stopped by SIGTERM (ray job stop, or kill)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """What the run ends with."""

    num_iterations: int
    weight_version: int
    parameter_checksum: str
    "of the trained target; equal runs end with equal checksums"


def run_training(
    plan: RunPlan, run_dir: RunDir, report: Reporter, resume: RunState | None = None
) -> TrainingResult:
    """Train as planned into the run folder; from a state of it where one is given. A profile is measured first.

    Raises InputError for what the user can fix, other RlhfSpecErrors for what failed on the way.
    """

    def stopping() -> None:
        run_dir.set_status(STOPPING, run_dir.stopped(BY_SIGTERM))

    with run_dir.heartbeat(), sigterm_exits(stopping), watching(report.note, report.awaits):
        if plan.profile is None:
            report.stage(START_UP_STAGES["profile"])
            plan = replace(plan, profile=RunProfile(plan.config, plan.inputs).resolve(report))
        report.stage(START_UP_STAGES["ray"])
        with (
            ray_session(
                plan.config.cluster,
                run_dir.path.name,
                on_sigterm=stopping,
                store_bytes=plan.memory.object_store_bytes,
                logs=run_dir.logs_folder,
                note=report.note,
            ) as session,
            observing(run_dir, session, report, num_iterations=plan.config.run.iterations) as observer,
        ):
            if session.dashboard_url:
                asks = "" if session.token_file is None else f" (asks for the token in {session.token_file})"
                report.note(f"dashboard {session.dashboard_url}{asks}")
            report.stage(START_UP_STAGES["actors"])
            manifest = _train_with_restarts(plan, session, run_dir, report, observer, resume)
    report.note(f"parameter checksum {manifest.checksum} (weight version {manifest.weight_version})")
    return TrainingResult(
        num_iterations=plan.config.run.iterations,
        weight_version=manifest.weight_version,
        parameter_checksum=manifest.checksum,
    )


def _train_with_restarts(
    plan: RunPlan,
    session: RaySession,
    run_dir: RunDir,
    report: Reporter,
    observer: Observer,
    state: RunState | None,
) -> WeightManifest:
    """Train to the end; what came of the target. Where a trainer is lost, from the last state on, all actors new."""
    restarts = TrainerRestarts(run_dir, most=plan.config.cluster.max_trainer_restarts, note=report.note)
    for attempt in count():
        # names of actors that may still be ending are not taken again
        own = replace(session, namespace=f"{session.namespace}-{attempt}") if attempt else session
        is_up = False
        # a node that was lost with a trainer takes minutes to come back
        patience_s = plan.config.cluster.start_timeout_s if attempt else 0.0
        try:
            with running_system(plan, own, note=report.note, patience_s=patience_s) as system:
                is_up = True
                note_dashboard(report.note)
                observer.watch(system)
                train(system, run_dir, report, resume=state)
            return system.target.manifest
        except TrainerLost as error:
            report.stop()
            state = restarts.after(error)
        except (*LOSSES, PlacementError) as error:
            # what cannot be brought up the first time is told at once, but for a run that had been up before
            if is_up or (not attempt and (state is None or isinstance(error, PlacementError))):
                raise
            state = restarts.after(TrainerLost(f"the new actors did not come up: {error}"))
    raise AssertionError("a count has no end")


def train(system: System, run_dir: RunDir, report: Reporter, *, resume: RunState | None = None) -> None:
    """Run every iteration, writing metrics, rollouts, moves and checkpoints as they come; a timeline at the end.

    `resume`: what the system, which has its first weights, is to go on from. Raises TrainerLost: see
    `cluster.resume.trainer_restarts`.
    """
    run, settings = Run(system, run_dir, report, resume), system.config.run
    report.on_progress = run_dir.progress
    report.start(settings.iterations, done=run.first)
    with ending_well(run), interrupts_between_updates(run):
        if resume is None:
            run.log.weights(system.target.manifest)
            run.log.before_training(run.evaluator.at_start())
        run.stand_at(run.first)
        for iteration in range(run.first, settings.iterations):
            system.is_learning = False
            try:
                metrics = run.outcomes.judged(with_signal(step(run, iteration)))
            except NumericsError as error:
                raise type(error)(f"iteration {iteration + 1} of {settings.iterations}: {error}") from error
            if iteration == run.first and report.start_up_s is not None:
                metrics |= start_up_metrics(report.start_up_s, report.stages_s)
            # instances and trainers hold the same version again
            system.is_learning, boundary = False, run.stand_at(iteration + 1)
            try:
                metrics = with_evaluation(metrics, run.evaluator.after(iteration))
            finally:
                # one that fails is over as well
                run.boundary = replace(boundary, evaluations=run.evaluator.marks)
                # what was trained is told, however an evaluation ends
                run.log.write(iteration, metrics)
            report.iteration(iteration, metrics)
            if (line := signal_line(iteration, metrics)) is not None:
                report.note(line)
            for line in run.outcomes.lines(iteration, metrics):
                report.note(line)
            if settings.checkpoint_every and (iteration + 1) % settings.checkpoint_every == 0:
                save_checkpoints(system, run_dir, iteration=iteration)
            run.states.at(run.stand_at(iteration + 1))
            if run.is_interrupted:
                raise KeyboardInterrupt
            give_back_free_memory()
            if (reason := run.evaluator.reason_to_stop or system.cursor.all_solved) is not None:
                report.note(reason)
                break
        save_checkpoints(system, run_dir)


def step(run: Run, iteration: int) -> dict[str, float]:
    """Sample, score, update, publish, refit; return the iteration's metrics.

    Where the schedule runs ahead, the phase beside the update samples later batches; weights are published, and the
    draft refit, while no sample is open.
    """
    system, schedule, report = run.system, run.schedule, run.report
    began_s = time.perf_counter()
    phases: list[Collected] = []
    if schedule.needs_filling(iteration):
        phases.append(_phase(run, iteration - 1))
        run.recorder.pass_over(system.generation.instances)
    update = Update(system, schedule, iteration, run.log)
    # in turns the phase is recorded before its update begins: what fails there finds the trainers at a boundary
    phases.append(_phase(run, iteration, beside=update if schedule.max_staleness else None))

    moves = run.recorder.record(
        iteration, phases[-1], system.generation.instances, system.generation.final_reports()
    )
    waited_from_s = time.perf_counter()
    report.progress("update", 0, 1)
    learned = update.wait()
    run.outcomes.unmoved = learned.unmoved
    late, num_late_skipped = run.stream.receive(schedule)
    _remember(run, iteration, [*(rollout for phase in phases for rollout in phase.rollouts), *late])
    update.log_advantages()
    if (easy := system.config.data.easy_threshold) is not None:
        system.cursor.leave_out_solved(update.sampled, easy)
    publish_began_s = time.perf_counter()
    parts = _publish(run, learned)
    refit_began_s = time.perf_counter()
    report.progress("refit", 0, 1)
    draft = refit_draft(system, update.batch, iteration_s=refit_began_s - began_s, report=report)
    ended_s = time.perf_counter()

    seconds = {
        "generate": sum(phase.generate_s for phase in phases),
        "score": sum(phase.score_s for phase in phases),
        # seconds add up to those of the iteration: what a phase hid is told beside them
        "update": publish_began_s - waited_from_s,
        "publish": refit_began_s - publish_began_s,
        "refit": ended_s - refit_began_s,
        "evaluate": 0.0,
        "iteration": ended_s - began_s,
    }
    if unread := unread_line([rollout.reward for rollout in update.sampled]):
        report.note(f"iteration {iteration + 1}: {unread}")
    metrics = iteration_metrics(update.sampled, phases[-1].stats, learned, seconds) | parts
    metrics |= update.waits(began_s, phases[-1].generated_s, refit_began_s)
    whole_s = max(seconds["update"], update.ended_s - update.began_s)
    metrics["update/outside_s"] = max(0.0, whole_s - sum(learned.part_seconds.values()))
    if schedule.max_staleness:
        # what was decoded here is not what was learned from here
        decoded = sum(phase.stats.num_emitted_tokens for phase in phases)
        metrics["rollout/goodput_tokens_per_s"] = decoded / max(seconds["generate"], 1e-9)
    if not phases[-1].stats.num_decode_steps:
        # the last update has nothing beside it, or all samples were taken over
        for name in ("goodput_tokens_per_s", "mean_acceptance_length", "acceptance_rate"):
            del metrics[f"rollout/{name}"]
    kept = run.log.record(iteration, update.learned, learned)
    metrics |= _pool_metrics(run, phases[-1], num_late_skipped + sum(phase.num_skipped for phase in phases))
    return metrics | schedule.metrics() | moves | draft | kept


def _phase(run: Run, number: int, *, beside: Update | None = None) -> Collected:
    """Decode what a phase asks for; what is cut, or waits for a reward, stays in the schedule."""
    run.system.generation.rollouts_ahead(max(run.schedule.num_phases - number - 1, 0))
    return run.stream.phase(run.schedule, number, beside=beside)


def _remember(run: Run, iteration: int, rollouts: Sequence[Rollout]) -> None:
    """Let drafters that look up have finished responses whose prompts come again."""
    config, cursor = run.system.config, run.system.cursor
    prompts_ahead = (config.run.iterations - iteration - 1) * config.rollout.prompts_per_iteration
    comes_again = config.algorithm.dynamic_sampling or cursor.comes_again(prompts_ahead)
    if config.speculation.remembers and comes_again:
        run.system.generation.remember(rollouts)


def _publish(run: Run, learned: UpdateReport) -> dict[str, float]:
    """Bring every instance the trainers' version; no sample is open. The metrics of what it took."""
    system = run.system
    run.report.progress("publish", 0, 1)
    if system.config.rollout.look_ahead != "off":
        system.scheduler.look_ahead(())
    before = system.target.manifest.checksum
    # an instance may join while the trainer is further on: what instances decode from must be at hand then
    broadcast = (
        None
        if run.schedule.max_staleness
        else system.broadcast.publish(system.target, learned.weight_version, system.generation.instances)
    )
    system.target = broadcast or system.trainers.take()
    (system.generation.keep if broadcast else system.generation.publish)(system.target)
    run.log.weights(system.target.manifest)
    seconds = {f"time/publish_{part}_s": seconds for part, seconds in system.target.part_seconds.items()}
    if not learned.num_optimizer_steps or not learned.metrics["lr"]:
        return seconds
    return seconds | {UNCHANGED: float(system.target.manifest.checksum == before)}


def _pool_metrics(run: Run, phase: Collected, num_skipped: int) -> dict[str, float]:
    """Of the pool, the data and the environment."""
    system, leaves_out = run.system, run.system.config.data.easy_threshold is not None
    return {
        "pool/cores": system.num_cores,
        "rollout/invariant": float(system.generation.is_invariant),
        "reward/num_skipped": float(num_skipped),
        "rollout/num_taken_over": float(phase.num_taken_over),
        "data/epoch": system.cursor.num_passes,
        **({"data/num_left": float(system.cursor.num_left)} if leaves_out else {}),
        **system.scheduler.attempt_metrics(),
        **phase.environment,
        **system.generation.metrics(),
    }
