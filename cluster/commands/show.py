"""`rlhfspec show`: the summary of a run folder, finished or not."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from cluster.commands.arguments import path_argument

if TYPE_CHECKING:
    pass

_TEXT = """\
Print what a run achieved, from its folder alone.

  rlhfspec show runs/demo-20260101-120000
"""


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "show",
        help="print what a run achieved",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run_dir", type=path_argument, metavar="RUN_DIR", help="folder that the run printed first"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print state and summary, of a damaged folder what can be read. Raises ConfigError when it is no run folder."""
    from cluster.reporting.console import Reporter
    from cluster.reporting.summary import summarise
    from cluster.run_folder.layout import RunDir
    from cluster.run_folder.run_status import describe_status
    from core.metrics import read_metrics

    run_dir = RunDir.open(args.run_dir)
    report = Reporter()
    for line in describe_status(run_dir.status()):
        report.note(line)
    metrics = read_metrics(run_dir.metrics_file, note=report.note) if run_dir.metrics_file.is_file() else []
    report.finish(summarise(metrics), run_dir)
    return 0
