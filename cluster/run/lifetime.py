"""A run of iterations: what it is made of, how it begins, and what is kept however it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from ...core.checkpoint_manifest import state_folders
from ...core.errors import NotAsLearned, RlhfSpecError, RunTaken, StorageError
from ...core.records import SampleRequest
from ...policies.staleness.free import Free, FreeAdmission
from ...policies.staleness.in_turns import InTurns, UsefulGroups
from ...policies.staleness.recorded import PhasePlan, Recorded
from ...policies.staleness.rollout_schedule import Schedule
from ..folder.layout import RunDir
from ..observe.console import Reporter
from ..observe.outcome_checks import Outcomes
from ..resume.checkpoints import kept_models, save_checkpoints
from ..resume.run_state import RunState
from ..resume.save_state import Boundary, StateKeeper, take_up
from ..resume.trainer_restarts import as_trainer_lost, noting_trainer_loss
from ..system.system import System
from .evaluate import Evaluator
from .recorded_rollouts import RecordedRollouts
from .recorder import Recorder
from .run_log import RunLog
from .stream import RolloutStream


class Run:
    """What an iteration works with."""

    def __init__(self, system: System, run_dir: RunDir, report: Reporter, resume: RunState | None) -> None:
        """Of a system that goes on from `resume`, where there is one."""
        self.system, self.run_dir, self.report = system, run_dir, report
        self.schedule = schedule_of(system)
        self.stream = RolloutStream(system, report, RecordedRollouts.of(system, report.note))
        if resume is not None:
            with noting_trainer_loss(system):
                take_up(system, resume, self.schedule)
        self.first = 0 if resume is None else resume.num_iterations
        "iterations that were finished before"
        config, marks = system.config, None if resume is None else resume.evaluations
        self.log = RunLog.begin(config.tracking, run_dir, report.note, num_done=self.first)
        self.recorder = Recorder(run_dir, report, step_log=config.run.step_log)
        self.evaluator = Evaluator(system, self.stream, run_dir, report, self.recorder, marks)
        self.states = StateKeeper(system, run_dir, report.note)
        self.outcomes = outcomes_of(system)
        system.trainers.meanwhile = self.stream.poll_pool
        self.boundary: Boundary | None = None
        "the last one at which instances and trainers held the same version"
        self.is_interrupted = False
        "Ctrl-C came while trainers learned"

    def stand_at(self, num_iterations: int) -> Boundary:
        """Note that so many iterations are finished, and the trainers not beyond them."""
        self.boundary = Boundary(
            num_iterations=num_iterations,
            cursor=self.system.cursor.state(),
            evaluations=self.evaluator.marks,
            in_flight=self.schedule.in_flight(),
        )
        return self.boundary


def outcomes_of(system: System) -> Outcomes:
    """What is to be expected of a run's iterations."""
    trainer, ends = system.config.trainer, list(system.sampling.stop_token_ids)
    in_float32 = system.config.models.dtype == "float32" and trainer.compute_dtype != "bfloat16"
    words = system.tokenizer.convert_ids_to_tokens(ends)
    named = ", ".join(f"{token} {word!r}" for token, word in zip(ends, words, strict=True))
    return Outcomes(is_exact=in_float32 and system.generation.is_invariant, ends=named or "(none)")


def schedule_of(system: System) -> Schedule:
    """The schedule that the config names, over the run's cursor."""
    config, rollout = system.config, system.config.rollout

    def next_requests(num_prompts: int = rollout.prompts_per_iteration) -> list[SampleRequest]:
        return system.cursor.next_requests(num_prompts, rollout.samples_per_prompt, system.sampling)

    batch = (rollout.prompts_per_iteration, rollout.samples_per_prompt, system.sampling)
    useful_groups = None
    if config.algorithm.dynamic_sampling:
        useful_groups = partial(
            UsefulGroups,
            partial(next_requests, 1),
            max_extra=round(config.algorithm.max_extra_groups * rollout.prompts_per_iteration),
            metric=config.algorithm.dynamic_sampling_metric,
            num_groups=rollout.prompts_per_iteration,
        )
    if not rollout.max_staleness:
        return InTurns(
            next_requests,
            num_iterations=config.run.iterations,
            useful_groups=useful_groups,
            peek=None if rollout.look_ahead == "off" else partial(system.cursor.peek, *batch),
        )
    if rollout.schedule == "free":
        admission = FreeAdmission(
            max_staleness=rollout.max_staleness,
            over_provisioning=rollout.over_provisioning or 1.0,
            groups_per_batch=rollout.prompts_per_iteration,
            num_iterations=config.run.iterations,
        )
        return Free(admission, next_requests)
    plan = PhasePlan(
        max_staleness=rollout.max_staleness,
        weight_load=rollout.weight_load,
        max_new_tokens=config.sampling.max_new_tokens,
        num_iterations=config.run.iterations,
    )
    return Recorded(plan, next_requests, useful_groups=useful_groups)


@contextmanager
def ending_well(run: Run) -> Iterator[None]:
    """Write the timeline at the end of the block, and keep what was learned where it fails.

    Raises TrainerLost: see `cluster.resume.trainer_restarts`.
    """
    try:
        yield
    except (RunTaken, SystemExit):
        # another's folder is not ours, and SIGTERM leaves no time
        raise
    except StorageError as error:
        # no room for a timeline; what is refused may be one file, and not the state
        _keep_what_was_learned(run, error)
        raise
    except RlhfSpecError as error:
        run.recorder.write_timeline()
        if error is run.stream.failure and run.boundary is not None:
            # whatever is lost besides: the run was let go on so far for this
            with suppress(RlhfSpecError):
                run.states.save(run.boundary)
        lost = as_trainer_lost(run.system, error)
        if lost is not None:
            raise lost from error
        # weights are here, or with trainers that were learning: those of a state then
        _keep_what_was_learned(run, error)
        raise
    except BaseException as error:
        run.recorder.write_timeline()
        if isinstance(error, KeyboardInterrupt) and not run.system.is_learning:
            run.system.trainers.meanwhile = None
            if run.boundary is not None and run.boundary.num_iterations:
                with suppress(RlhfSpecError):
                    run.states.save(run.boundary)
        raise
    finally:
        run.log.close()
    run.recorder.write_timeline()


@contextmanager
def interrupts_between_updates(run: Run) -> Iterator[None]:
    """Ctrl-C while trainers learn ends the run behind that iteration, whose state is kept; a second one at once."""

    def interrupt(number: int, frame: Any) -> None:
        if run.is_interrupted or not run.system.is_learning:
            return before(number, frame)
        run.is_interrupted = True
        run.report.note(
            "Ctrl-C: the run ends, and keeps its state, when this update is through; again: at once, without"
        )

    before: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # Ctrl-C is another's, or nobody's
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _keep_what_was_learned(run: Run, error: RlhfSpecError) -> None:
    """Save state and weights of the iterations that are finished; `error`, which ended the run, says how to go on."""
    # what ended the run would end this too
    run.system.trainers.meanwhile = None
    if run.system.target.manifest.weight_version:
        try:
            error.add_note(_kept(run, error))
        except RlhfSpecError:
            # what cannot be kept hides nothing of what ended the run
            error.add_note(run.run_dir.goes_on())


def _kept(run: Run, error: RlhfSpecError) -> str:
    """Save state and weights; how to go on from them."""
    system, run_dir = run.system, run.run_dir
    finished = system.target.manifest.weight_version
    if run.boundary is not None and not system.is_learning:
        with suppress(RlhfSpecError):
            run.states.save(run.boundary)
    if state_folders(run_dir.checkpoints_folder):
        if not isinstance(error, NotAsLearned):
            with suppress(RlhfSpecError):
                save_checkpoints(system, run_dir, with_adapter=False)
        return f"{finished} iterations are finished; {run_dir.goes_on()}"
    save_checkpoints(system, run_dir, with_adapter=False)
    paths = [f"--set models.{model}={path}" for model, path in kept_models(system, run_dir).items()]
    return (
        f"{finished} iterations are finished and their weights kept; go on from them with `rlhfspec train --config "
        f"{run_dir.config_file} {' '.join(paths)} --set run.iterations={system.config.run.iterations - finished} "
        f"--set run.seed={system.config.run.seed + 1}` (prompts in another order; the optimizer, its schedule and the "
        "reference of the KL control begin anew)"
    )
