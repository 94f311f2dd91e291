"""`rlhfspec train` and `rlhfspec demo`: run RLHF from a config to a run folder."""

from __future__ import annotations

import argparse
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.commands.arguments import add_config_arguments
from cluster.origin import ROOT

if TYPE_CHECKING:
    from cluster.inputs import Inputs
    from cluster.report import Reporter
    from cluster.rundir import RunDir
    from core.config import Config

DEMO_CONFIG = ROOT / "configs" / "demo.yaml"

_TRAIN = """\
Run RLHF: sample responses on the generation actors, score them, update the policy, publish its weights.

  rlhfspec train --config configs/gsm8k_ppo.yaml --set data.path=train.jsonl \\
      --set models.target=pair/target --set models.draft=pair/draft
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
        add_config_arguments(parser, default=default)
        parser.add_argument(
            "--dry-run", action="store_true", help="check everything, print config and plan, run nothing"
        )
        parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, then train (or only print, with --dry-run). Raises InputError for bad input."""
    from cluster.report import Reporter
    from cluster.rundir import choose_run_path, is_ray_working_dir
    from core.config_io import load_config

    report = Reporter()
    config = load_config(args.config, args.set)
    path = choose_run_path(config.run, caller_dir=Path.cwd(), now=datetime.now())
    report.note(f"run folder {path}" + (" (dry run: not made)" if args.dry_run else ""))
    if is_ray_working_dir(Path.cwd()):
        report.note("  not in the job's own folder, which Ray deletes; run.output_dir says where else")
    try:
        return _run(config, path, report, dry_run=args.dry_run)
    finally:
        report.stop()


def _run(config: Config, path: Path, report: Reporter, *, dry_run: bool) -> int:
    from cluster.prepare import resolve_models
    from cluster.rundir import RunDir

    report.stage("loading torch and transformers")
    config = resolve_models(config, report)
    report.stage("checking models, data and memory")
    from cluster.check import check_run

    checked = check_run(config, output_dir=path)
    report.stop()
    if dry_run:
        _print_plan(config, checked.lines(), report)
    else:
        from cluster.profiling import resolve_profile

        inputs = replace(checked.inputs, profile=resolve_profile(config, checked.inputs, report))
        _train(config, inputs, RunDir.create(config, path), report)
    return 0


def _print_plan(config: Config, lines: list[str], report: Reporter) -> None:
    import yaml

    report.note(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    report.note("\n".join(lines))


def _train(config: Config, inputs: Inputs, run_dir: RunDir, report: Reporter) -> None:
    """Run the loop; however it ends, the run folder says so and holds summary and picture so far."""
    report.stage("starting Ray")
    from cluster.loop import run_training

    try:
        run_training(config, inputs, run_dir, report)
    except BaseException as error:
        ending = "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
        run_dir.set_status(ending, f"{type(error).__name__}: {error}")
        _close(run_dir, report)
        raise
    run_dir.set_status("finished")
    _close(run_dir, report)


def _close(run_dir: RunDir, report: Reporter) -> None:
    from cluster.picture import write_picture
    from cluster.summary import summarise
    from core.metrics import read_metrics

    metrics = read_metrics(run_dir.metrics_file) if run_dir.metrics_file.is_file() else []
    summary = summarise(metrics)
    if summary is not None:
        run_dir.summary_file.write_text(summary.text())
        write_picture(metrics, run_dir.picture_file)
    report.finish(summary, run_dir)
