"""`rlhfspec train` and `rlhfspec demo`: run RLHF from a config to a run folder."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cluster.commands.arguments import add_config_arguments, add_run_folder_argument
from cluster.placement.origin import ROOT
from cluster.preflight.prepared_run import PreparedRun, prepare_run

if TYPE_CHECKING:
    from cluster.preflight.inputs import Inputs
    from cluster.reporting.console import Reporter
    from cluster.resuming.run_state import RunState
    from cluster.run_folder.layout import RunDir
    from core.config import Config

DEMO_CONFIG = ROOT / "configs" / "demo.yaml"

_TRAIN = """\
Run RLHF: sample responses on the generation actors, score them, update the target, publish its weights.

  rlhfspec train --config configs/gsm8k_ppo.yaml --set data.path=train.jsonl \\
      --set models.target=pair/target --set models.draft=pair/draft
  rlhfspec train --resume RUN                             go on with a run that was cut off, to the same result
  rlhfspec train --config configs/demo.yaml --dry-run     print the resolved config and the plan, run nothing
"""

_DEMO = """\
Train configs/demo.yaml: makes and caches a small target and draft model on the first run, then runs
RLHF on step-by-step letter chains, on a local Ray with its dashboard.
"""


def add_parser(commands: Any) -> None:
    """Describe both commands."""
    demo_help = "a whole run on a small pair that is made on the spot"
    train_help = "run RLHF from a config"
    for name, summary, text, default in (
        ("demo", demo_help, _DEMO, DEMO_CONFIG),
        ("train", train_help, _TRAIN, None),
    ):
        parser = commands.add_parser(
            name,
            help=summary,
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_config_arguments(parser, default=default, required=False)
        add_run_folder_argument(parser)
        parser.add_argument(
            "--dry-run", action="store_true", help="check everything, print config and plan, run nothing"
        )
        if name == "train":
            parser.add_argument(
                "--resume",
                metavar="RUN",
                help="go on with the run in this folder, by its own config, from its last state (run.state_every); the "
                "result is that of a run that was never cut off (but for rollout.schedule free). auto: with the newest "
                "run of --config that is not finished, else with a new one",
            )
        parser.set_defaults(run=run, resume=None)


def run(args: argparse.Namespace) -> int:
    """Check, then train (or only print, with --dry-run). Raises InputError for bad input."""
    from cluster.reporting.console import Reporter

    report = Reporter()
    try:
        prepared = prepare_run(args, report, dry_run=args.dry_run)
        return _run(prepared, report, dry_run=args.dry_run)
    finally:
        report.stop()


def _run(prepared: PreparedRun, report: Reporter, *, dry_run: bool) -> int:
    from cluster.run_folder.layout import RunDir

    config, path, checked, resumed = prepared.config, prepared.path, prepared.checked, prepared.resumed
    if dry_run:
        _print_plan(config, checked.lines(), report)
    else:
        from cluster.preflight.run_profile import resolve_profile
        from cluster.run_folder.leftovers import sweep_run_folders

        inputs = replace(checked.inputs, profile=resolve_profile(config, checked.inputs, report))
        for line in (checked.adapter, checked.correction, *checked.functions):
            if line is not None:
                report.note(line)
        for line in (inputs if resumed is None else inputs.dataset).notes():
            report.note(line)
        run_dir = RunDir.create(config, path) if resumed is None else resumed.begin(config, report.note)
        if run_dir.path != path:
            report.note(f"run folder {run_dir.path} (another run took the first name)")
        for line in sweep_run_folders(path.parent):
            report.note(line)
        from cluster.run_folder.remote_copy import copying

        with copying(run_dir, config.run.copy_to, report.note):
            _train(config, inputs, run_dir, report, None if resumed is None else resumed.state)
    return 0


def _print_plan(config: Config, lines: list[str], report: Reporter) -> None:
    import yaml

    report.note(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    report.note("\n".join(lines))


def _train(
    config: Config, inputs: Inputs, run_dir: RunDir, report: Reporter, state: RunState | None = None
) -> None:
    """Run the loop; however it ends, the run folder says so and holds summary and picture so far."""
    report.stage("starting Ray")
    from cluster.loop import run_training
    from core.errors import RunTaken, StorageError
    from core.files import storage_errors

    try:
        # beside the run's files, the log may be on the full disk
        with storage_errors(run_dir.path, only_known=True):
            run_training(config, inputs, run_dir, report, state)
    except BaseException as error:
        # nothing from here on may hide what ended the run
        is_stop = isinstance(error, SystemExit)
        if not is_stop:
            with suppress(Exception):
                _set_ending(run_dir, error)
        with suppress(Exception):
            # a full disk takes no more files, another's run none of ours; whoever sent SIGTERM waits for no drawing
            may_write = not isinstance(error, StorageError | RunTaken)
            _close(run_dir, report, with_files=may_write, with_picture=not is_stop)
        if is_stop:
            # it is stopping until nothing more is written
            with suppress(Exception):
                _set_ending(run_dir, error)
        if is_stop or isinstance(error, KeyboardInterrupt):
            with suppress(Exception):
                report.note("{state}: {reason}".format_map(run_dir.status()))
        raise
    run_dir.set_status("finished")
    _close(run_dir, report)


def _set_ending(run_dir: RunDir, error: BaseException) -> None:
    from cluster.run_folder.run_status import STOPPING
    from core.errors import describe_error

    if isinstance(error, KeyboardInterrupt):
        run_dir.set_status("interrupted", run_dir.stopped("stopped by Ctrl-C"))
    elif isinstance(error, SystemExit):
        # the handler of SIGTERM has said why, before anything else
        status = run_dir.status()
        why = status["reason"] if status["state"] == STOPPING else describe_error(error)
        run_dir.set_status("interrupted", why)
    else:
        run_dir.set_status("failed", describe_error(error))


def _close(run_dir: RunDir, report: Reporter, *, with_files: bool = True, with_picture: bool = True) -> None:
    """Print the closing table, write it and its picture; what goes wrong is a note."""
    from cluster.reporting.summary import summarise
    from core.errors import describe_error
    from core.files import write_whole
    from core.metrics import read_metrics

    summary = None
    try:
        metrics = (
            read_metrics(run_dir.metrics_file, note=report.note) if run_dir.metrics_file.is_file() else []
        )
        summary = summarise(metrics)
        if summary is not None and with_files:
            write_whole(run_dir.summary_file, summary.text())
            if with_picture:
                # matplotlib takes a while to load
                from cluster.reporting.progress_picture import write_picture

                write_picture(metrics, run_dir.picture_file)
    except Exception as error:
        report.note(f"summary or picture is missing: {describe_error(error)}")
    report.finish(summary, run_dir)
