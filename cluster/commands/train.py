"""`rlhfspec train`, `demo` and `check`: run RLHF from a config to a run folder, or see whether it could run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..ray_start.machine import Gpus
from ..ray_start.origin import ROOT
from .arguments import ConfigFile, Overrides, RunFolder
from .arguments import gpus as gpus_of
from .declare import Arg

if TYPE_CHECKING:
    from ..folder.layout import RunDir
    from ..observe.console import Reporter
    from ..plan.run_plan import RunPlan
    from ..resume.run_state import RunState
    from ..run.prepared_run import PreparedRun

DEMO_CONFIG = ROOT / "configs" / "demo.yaml"

DryRun = Annotated[bool, Arg(help="check everything, print config and plan, run nothing")]


def train(
    *,
    config: ConfigFile | None = None,
    overrides: Overrides,
    out: RunFolder | None = None,
    dry_run: DryRun = False,
    resume: Annotated[
        str,
        Arg(
            "RUN",
            "go on with the run in this folder, by its own config, from its last state (run.state_every); the "
            "result is that of a run that was never cut off (but for rollout.schedule free). auto: with the newest "
            "run of --config that is not finished, else with a new one",
        ),
    ]
    | None = None,
    rollouts: Annotated[
        Path,
        Arg(
            "RUN",
            "an earlier run whose responses are taken over, and scored by this run's reward, while its weights were "
            "this run's; from there on they are drafts (rollout.record)",
        ),
    ]
    | None = None,
) -> int:
    r"""Run RLHF from a config.

    Run RLHF: sample responses on the generation actors, score them, update the target, publish its weights.

      rlhfspec train --config configs/gsm8k_ppo.yaml --set data.path=train.jsonl \
          --set models.target=pair/target --set models.draft=pair/draft
      rlhfspec train --resume RUN                             go on with a run that was cut off, to the same result
      rlhfspec train --config configs/demo.yaml --dry-run     print the resolved config and the plan, run nothing
    """
    from ..observe.console import Reporter
    from ..run.prepared_run import prepare_run

    with Reporter() as report:
        prepared = prepare_run(
            config, overrides, report, out=out, resume=resume, record=rollouts, dry_run=dry_run
        )
        if dry_run:
            tell_plan(prepared.plan, report)
        else:
            run_prepared(prepared, report)
    return 0


def demo(
    *,
    config: ConfigFile = DEMO_CONFIG,
    overrides: Overrides,
    out: RunFolder | None = None,
    dry_run: DryRun = False,
) -> int:
    """A whole run on a small pair that is made on the spot.

    Train configs/demo.yaml: makes and caches a small target and draft model on the first run, then runs
    RLHF on step-by-step letter chains, on a local Ray with its dashboard. At the end the last batch is decoded once
    more without speculation and moves (`rlhfspec compare`), and what they gave is printed (more: `rlhfspec explain`).
    """
    from ..observe.console import Reporter
    from ..run.prepared_run import prepare_run
    from .verify import compare_and_tell

    with Reporter() as report:
        prepared = prepare_run(config, overrides, report, out=out, dry_run=dry_run)
        if dry_run:
            tell_plan(prepared.plan, report)
            return 0
        run_dir = run_prepared(prepared, report)
        from ...core.errors import DataError
        from ..observe.explanation import explain_run
        from ..observe.run_record import RunRecord
        from ..observe.summary import as_text

        try:
            compare_and_tell(run_dir.path, report)
        except DataError as error:
            # of a config of one's own, whose runs cannot be compared
            report.stop()
            report.note(str(error))
        explained = explain_run(RunRecord.read(run_dir.path, lambda line: None))  # its end told what is odd
        if explained is not None:
            report.note(as_text(explained.mechanisms()).rstrip())
    return 0


def tell_plan(plan: RunPlan, report: Reporter) -> None:
    """Print config and plan."""
    import yaml

    report.note(yaml.safe_dump(plan.config.model_dump(mode="json"), sort_keys=False))
    report.note("\n".join(plan.report))


def check(
    *,
    config: ConfigFile | None = None,
    overrides: Overrides,
    resume: Annotated[
        str, Arg("RUN", "check whether the run in this folder can be gone on with, as `train --resume`")
    ]
    | None = None,
    gpus: Annotated[
        Gpus,
        Arg(
            "NxGIB",
            "check for a machine with so many GPUs of so much memory each, such as 8x79 (what torch sees of 80 GB), in "
            "place of this one; its cores, memory and disk are not known, and no weights are read",
            parse=gpus_of,
        ),
    ]
    | None = None,
) -> int:
    """Check a config and print its memory, disk and placement plan.

    Validate a config with its models, tokenizers and data, and print the memory, disk and placement plan.

    Nothing is started. What `train` refuses for its config, its files or this machine is refused here, in the same
    words (exit code 2); the weights are read for it once. Where the run would join a cluster, its places are reserved
    there for a moment and given back.
    """
    from ..observe.console import Reporter

    with Reporter() as report:
        from ..run.prepared_run import prepare_run

        plan = prepare_run(config, overrides, report, resume=resume, elsewhere=gpus, dry_run=True).plan
        from ..plan.model_files import require_finite_weights
        from ..plan.run_check import require_room_in_cluster

        where = "here"
        if gpus is None:
            report.stage("reading the weights")
            require_finite_weights(plan.models.configs, plan.config.models.dtype)
            require_room_in_cluster(plan)
        else:
            where = f"on {gpus.number} GPUs of {gpus.each_bytes / 2**30:g} GiB"
        report.stop()
        for line in (*plan.report, f"check passed: the config can run {where}"):
            report.note(line)
    return 0


def run_prepared(prepared: PreparedRun, report: Reporter) -> RunDir:
    """Train; the run folder."""
    from ...core.config_io import config_text
    from ..folder.layout import RunDir
    from ..folder.leftovers import sweep_run_folders
    from ..folder.remote_copy import copying

    plan, path, resumed = prepared.plan, prepared.path, prepared.resumed
    config, inputs = plan.config, plan.inputs
    for line in (*plan.notes, *(inputs if resumed is None else inputs.dataset).notes()):
        report.note(line)
    run_dir = (
        RunDir.create(config, path) if resumed is None else resumed.begin(config_text(config), report.note)
    )
    if run_dir.path != path:
        report.note(f"run folder {run_dir.path} (another run took the first name)")
    for line in sweep_run_folders(path.parent):
        report.note(line)
    with copying(run_dir, config.run.copy_to, report.note):
        _train(plan, run_dir, report, None if resumed is None else resumed.state.within(run_dir))
    return run_dir


def _train(plan: RunPlan, run_dir: RunDir, report: Reporter, state: RunState | None = None) -> None:
    """Run the loop; however it ends, the run folder says so and holds the summary so far."""
    from ...core.errors import RunTaken, StorageError
    from ...core.files import storage_errors
    from ..run.loop import run_training

    try:
        # beside the run's files, the log may be on the full disk
        with storage_errors(run_dir.path, only_known=True):
            run_training(plan, run_dir, report, state)
    except BaseException as error:
        # nothing from here on may hide what ended the run
        is_stop = isinstance(error, SystemExit)
        if not is_stop:
            with suppress(Exception):
                _set_ending(run_dir, error)
        with suppress(Exception):
            # a full disk takes no more files, another's run none of ours
            may_write = not isinstance(error, StorageError | RunTaken)
            _close(run_dir, report, with_files=may_write)
        if is_stop:
            # it is stopping until nothing more is written
            with suppress(Exception):
                _set_ending(run_dir, error)
        if is_stop or isinstance(error, KeyboardInterrupt):
            with suppress(Exception):
                report.note("{state}: {reason}".format_map(run_dir.status()))
                error.args = error.args or (run_dir.status()["reason"],)  # what Python shows last
        raise
    run_dir.set_status("finished")
    _close(run_dir, report)


def _set_ending(run_dir: RunDir, error: BaseException) -> None:
    from ...core.errors import describe_error
    from ..folder.run_status import STOPPING

    if isinstance(error, KeyboardInterrupt):
        run_dir.set_status("interrupted", run_dir.stopped("stopped by Ctrl-C"))
    elif isinstance(error, SystemExit):
        # the handler of SIGTERM has said why, before anything else
        status = run_dir.status()
        why = status["reason"] if status["state"] == STOPPING else describe_error(error)
        run_dir.set_status("interrupted", why)
    else:
        run_dir.set_status("failed", describe_error(error))


def _close(run_dir: RunDir, report: Reporter, *, with_files: bool = True) -> None:
    """Print the closing table and write it; what goes wrong is a note."""
    from ...core.errors import describe_error
    from ...core.files import write_whole
    from ..observe.explanation import explain_run
    from ..observe.run_record import RunRecord
    from ..observe.summary import as_text

    record, rows = None, []
    try:
        if run_dir.path.is_dir():
            record = RunRecord.read(run_dir.path, report.note)
            rows = record.rows
        if rows and with_files:
            write_whole(run_dir.summary_file, as_text(rows))
    except Exception as error:
        report.note(f"the summary is missing: {describe_error(error)}")
    report.finish(rows, run_dir)
    if record is not None:
        with suppress(Exception):
            # on the way out of a run that failed nothing may hide why
            explained = explain_run(record)
            if explained is not None:
                report.note(f"change next: {explained.change()} (more: rlhfspec explain)")
