"""`rlhfspec check`: validate config, models, tokenizers and data; print the plan; run nothing."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster.commands.arguments import add_config_arguments

_TEXT = """\
Validate a config with its models, tokenizers and data, and print the memory, disk and placement plan.

Nothing is started. `train` makes the same checks first. A plan that does not fit is refused (exit code 2).
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report. Raises InputError at the first fault."""
    from cluster.preflight.named_models import resolve_models
    from cluster.reporting.console import Reporter
    from cluster.run_folder.layout import choose_run_path
    from core.config_io import load_config

    report = Reporter()
    config = load_config(args.config, args.set)
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
