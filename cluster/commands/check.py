"""`rlhfspec check`: validate config, models, tokenizers and data; print the plan; run nothing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from cluster.commands.arguments import add_config_arguments, add_like_argument, path_argument
from cluster.preflight.prepared_run import prepare_run
from core.errors import ConfigError

if TYPE_CHECKING:
    from cluster.reporting.console import Reporter
    from core.config import Config

_TEXT = """\
Validate a config with its models, tokenizers and data, and print the memory, disk and placement plan.

Nothing is started. What `train` refuses for its config, its files or this machine is refused here, in the same words
(exit code 2); the weights are read for it once. Where the run would join a cluster, its places are reserved there for
a moment and given back.

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
    add_config_arguments(parser, required=False)
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="check whether the run in this folder can be gone on with, as `train --resume`",
    )
    parser.add_argument(
        "--manifest", type=path_argument, metavar="FILE", help="a manifest for KubeRay to compare with"
    )
    add_like_argument(parser)
    parser.set_defaults(run=run, out=None)


def run(args: argparse.Namespace) -> int:
    """Print the report. Raises InputError at the first fault."""
    from cluster.reporting.console import Reporter
    from core.config_io import load_config

    report = Reporter()
    if args.manifest is not None:
        if args.config is None:
            raise ConfigError("--manifest is compared with a config: expected --config FILE, got none")
        return _check_manifest(load_config(args.config, args.set), args, report)
    if args.like:
        raise ConfigError("--like is for --manifest: without it the models are those of the config")
    try:
        prepared = prepare_run(args, report, dry_run=True)
        from cluster.preflight.model_files import require_finite_weights
        from cluster.preflight.run_check import require_place_in_cluster

        report.stage("reading the weights")
        config = prepared.config
        require_finite_weights(config.models, has_draft_model=config.speculation.drafter == "model")
        require_place_in_cluster(config)
    finally:
        report.stop()
    for line in prepared.checked.lines():
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
