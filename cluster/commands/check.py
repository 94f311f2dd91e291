"""`rlhfspec check`: validate config, models, tokenizers and data; print the plan; run nothing."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.commands.arguments import add_config_arguments, add_like_argument, path_argument
from core.errors import ConfigError

if TYPE_CHECKING:
    from cluster.reporting.console import Reporter
    from core.config import Config

_TEXT = """\
Validate a config with its models, tokenizers and data, and print the memory, disk and placement plan.

Nothing is started. `train` makes the same checks first. A plan that does not fit is refused (exit code 2).

With --manifest FILE the plan is compared with a RayJob or RayCluster for Kubernetes instead of this machine: groups too
small for their actors, missing GPUs, memory below the plan are named. Data and weights are not read then.
"""


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "check",
        help="check a config and print its memory, disk and placement plan",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--manifest", type=path_argument, metavar="FILE", help="a manifest for KubeRay to compare with"
    )
    add_like_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report. Raises InputError at the first fault."""
    from cluster.preflight.named_models import resolve_models
    from cluster.reporting.console import Reporter
    from cluster.run_folder.layout import choose_run_path
    from core.config_io import load_config

    report = Reporter()
    config = load_config(args.config, args.set)
    if args.manifest is not None:
        return _check_manifest(config, args, report)
    if args.like:
        raise ConfigError("--like is for --manifest: without it the models are those of the config")
    path = choose_run_path(config.run, caller_dir=Path.cwd(), now=datetime.now())
    try:
        report.stage("loading torch and transformers")
        config = resolve_models(config, report)
        report.stage("checking models, data and memory")
        from cluster.preflight.run_check import check_run

        lines = check_run(config, output_dir=path).lines()
    finally:
        report.stop()
    for line in lines:
        report.note(line)
    report.note("check passed: the config can run here")
    return 0


def _check_manifest(config: Config, args: argparse.Namespace, report: Reporter) -> int:
    from cluster.commands.kube import pods_of

    try:
        report.stage("reckoning the plan")
        pods = pods_of(config, like=args.like)
        from cluster.kuberay.manifest_check import require_manifest

        require_manifest(args.manifest, pods)
    finally:
        report.stop()
    report.note(f"check passed: {args.manifest} can hold the run")
    return 0
