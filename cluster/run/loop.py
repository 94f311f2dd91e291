"""The RL loop: iterations one after the other (`cluster.run.iterations`), what is written of them, how a run ends."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from rlhfspec.actors.waiting.vitals import give_back_free_memory
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.folder.run_log import RunLog
from rlhfspec.cluster.folder.run_status import STOPPING
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.observe.iteration_metrics import with_evaluation
from rlhfspec.cluster.observe.observer import Observer, observing
from rlhfspec.cluster.observe.recorder import Recorder
from rlhfspec.cluster.observe.summary import signal_line, with_signal
from rlhfspec.cluster.placement.ray_session import RaySession, ray_session, sigterm_exits
from rlhfspec.cluster.plan.run_plan import RunPlan
from rlhfspec.cluster.resume.checkpoints import kept_models, save_checkpoints
from rlhfspec.cluster.resume.restarts import LOSSES, TrainerRestarts, as_trainer_lost, telling_trainer_loss
from rlhfspec.cluster.resume.run_state import RunState
from rlhfspec.cluster.resume.save_state import Boundary, StateKeeper, take_up
from rlhfspec.cluster.run.collect import attend
from rlhfspec.cluster.run.counted_pipeline import CountedPipeline
from rlhfspec.cluster.run.evaluate import Evaluator
from rlhfspec.cluster.run.free_pipeline import FreePipeline
from rlhfspec.cluster.run.iterations import next_batch, next_prompts, run_iteration, run_pipelined_iteration
from rlhfspec.cluster.run.pipeline import InFlight, Pipeline
from rlhfspec.cluster.system.system import System, running_system
from rlhfspec.core.checkpoint_manifest import state_folders, state_number
from rlhfspec.core.errors import (
    NumericsError,
    PlacementError,
    RewardServerLost,
    RlhfSpecError,
    RunTaken,
    StorageError,
    TrainerLost,
)
from rlhfspec.core.weight_records import WeightManifest
from rlhfspec.policies.pipelining.free_admission import FreeAdmission
from rlhfspec.policies.pipelining.phase_plan import PhasePlan

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
    """Train as planned into the run folder; from a state of it where one is given.

    Raises InputError for what the user can mend, other RlhfSpecErrors for what failed on the way.
    """

    def stopping() -> None:
        run_dir.set_status(STOPPING, run_dir.stopped(BY_SIGTERM))

    with (
        run_dir.heartbeat(),
        sigterm_exits(stopping),
        ray_session(
            plan.config.cluster,
            run_dir.path.name,
            on_sigterm=stopping,
            store_bytes=None if plan.memory is None else plan.memory.object_store_bytes,
            logs=run_dir.logs_folder,
        ) as session,
        observing(run_dir, session, report, num_iterations=plan.config.run.iterations) as observer,
    ):
        for line in session.notes:
            report.note(line)
        if session.dashboard_url:
            asks = "" if session.token_file is None else f" (asks for the token in {session.token_file})"
            report.note(f"dashboard {session.dashboard_url}{asks}")
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
    `cluster.resume.restarts`.
    """
    first, pipeline = 0, _pipeline(system)
    if resume is not None:
        with telling_trainer_loss(system):
            take_up(system, resume, pipeline)
        first = resume.num_iterations
    run = system.config.run
    log = RunLog.begin(system.config.tracking, run_dir, report.note, num_done=first)
    recorder = Recorder(run_dir, report, step_log=run.step_log)
    evaluator = Evaluator(system, run_dir, report, recorder, None if resume is None else resume.evaluations)
    states = StateKeeper(system, run_dir, report.note)
    system.trainers.meanwhile = lambda: attend(system, report)
    report.on_progress = run_dir.progress
    report.start(run.iterations, done=first)
    boundary: Boundary | None = None

    def here(num_iterations: int) -> Boundary:
        return Boundary(
            num_iterations=num_iterations,
            cursor=system.cursor.state(),
            evaluations=evaluator.marks,
            in_flight=InFlight() if pipeline is None else pipeline.in_flight(),
        )

    try:
        if resume is None:
            log.weights(system.target.manifest)
            log.before_training(evaluator.at_start())
        boundary = here(first)
        for iteration in range(first, run.iterations):
            system.is_learning = False
            try:
                if pipeline is None:
                    figures = run_iteration(system, iteration, report, recorder, log)
                else:
                    figures = run_pipelined_iteration(system, pipeline, iteration, report, recorder, log)
            except NumericsError as error:
                raise type(error)(f"iteration {iteration + 1} of {run.iterations}: {error}") from error
            figures = with_signal(figures)
            # instances and trainers hold the same version again
            system.is_learning, boundary = False, here(iteration + 1)
            try:
                figures = with_evaluation(figures, evaluator.after(iteration))
            finally:
                # one that fails is over as well
                boundary = replace(boundary, evaluations=evaluator.marks)
                # what was trained is told, however an evaluation ends
                log.write(iteration, figures)
            report.iteration(iteration, figures)
            if (line := signal_line(iteration, figures)) is not None:
                report.note(line)
            if run.checkpoint_every and (iteration + 1) % run.checkpoint_every == 0:
                save_checkpoints(system, run_dir, iteration=iteration)
            boundary = here(iteration + 1)
            states.at(boundary)
            give_back_free_memory()
        save_checkpoints(system, run_dir)
    except RewardServerLost as error:
        recorder.write_timeline()
        kept = _keep_what_was_learned(system, run_dir, states, boundary)
        raise RewardServerLost(f"{error}; {kept}") from error
    except (StorageError, SystemExit, RunTaken):
        # a full disk has no room for pictures, SIGTERM leaves no time for them, and another's folder is not ours
        raise
    except RlhfSpecError as error:
        recorder.write_timeline()
        if error is system.late_failure and boundary is not None:
            # whatever is lost besides: the run was let go on so far for this
            with suppress(RlhfSpecError):
                states.save(boundary)
        lost = as_trainer_lost(system, error)
        if lost is not None:
            raise lost from error
        with suppress(RlhfSpecError):
            # what ended the run is what is told; weights are here, whoever died
            report.note(_keep_what_was_learned(system, run_dir, states, boundary))
        raise
    except BaseException:
        recorder.write_timeline()
        raise
    finally:
        log.close()
    recorder.write_timeline()


def _pipeline(system: System) -> Pipeline | None:
    """What keeps samples that run ahead of learning; None where nothing does."""
    config, rollout = system.config, system.config.rollout
    if not rollout.max_staleness:
        return None
    if rollout.schedule == "free":
        admission = FreeAdmission(
            max_staleness=rollout.max_staleness,
            over_provisioning=rollout.over_provisioning or 1.0,
            groups_per_batch=rollout.prompts_per_iteration,
            num_iterations=config.run.iterations,
        )
        return FreePipeline(admission, partial(next_prompts, system))
    plan = PhasePlan(
        max_staleness=rollout.max_staleness,
        weight_load=rollout.weight_load,
        max_new_tokens=config.sampling.max_new_tokens,
        num_iterations=config.run.iterations,
    )
    return CountedPipeline(plan, partial(next_batch, system))


def _keep_what_was_learned(
    system: System, run_dir: RunDir, states: StateKeeper, boundary: Boundary | None
) -> str:
    """Save state and weights of the iterations that are finished; how to go on from them."""
    # what ended the run would end this too
    system.trainers.meanwhile = None
    finished = system.target.manifest.weight_version
    if not finished:
        return "no iteration was finished"
    if boundary is not None and not system.is_learning:
        with suppress(RlhfSpecError):
            states.save(boundary)
    if state_folders(run_dir.checkpoints_folder):
        with suppress(RlhfSpecError):
            save_checkpoints(system, run_dir, with_adapter=False)
        last = state_number(state_folders(run_dir.checkpoints_folder)[0])
        again = f", which repeats from iteration {last + 1} on" if last < finished else ""
        return (
            f"{finished} iterations are finished; go on with `rlhfspec train --resume {run_dir.path}`{again}"
        )
    save_checkpoints(system, run_dir, with_adapter=False)
    paths = [f"--set models.{model}={path}" for model, path in kept_models(system, run_dir).items()]
    return (
        f"{finished} iterations are finished and their weights kept; go on from them with `rlhfspec train --config "
        f"{run_dir.config_file} {' '.join(paths)} --set run.iterations={system.config.run.iterations - finished} "
        f"--set run.seed={system.config.run.seed + 1}` (prompts in another order; the optimizer, its schedule and the "
        "reference of the KL control begin anew)"
    )
