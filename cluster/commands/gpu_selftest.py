"""`rlhfspec gpu-selftest`: what a user with a GPU runs first, and attaches to a bug."""

from __future__ import annotations

import argparse
import importlib
from importlib.util import find_spec
from typing import Any

from cluster.commands.arguments import out_folder, path_argument

_TEXT = """\
Try the engine on this machine's first GPU and write DIR/report.md and DIR/gpu_selftest.json.

Parts: log-probabilities and the distribution of sampled tokens beside Hugging Face's forward, speed beside its
`generate`, the share of the memory bandwidth's bound, the tests marked gpu. Minutes. A part that fails is
reported and the others go on; exit code 1 then, 2 where there is no CUDA device.
"""


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "gpu-selftest",
        help="try the engine on this machine's GPU and write a report",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=path_argument, required=True, metavar="DIR", help="where the report goes"
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples and rounds")
    parser.add_argument("--real", action="store_true", help="SmolLM2-135M-Instruct instead of the demo pair")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run it. Raises ConfigError where torch sees no CUDA device, or the benchmarks are not there."""
    from core.errors import ConfigError

    if find_spec("benchmarks") is None:
        raise ConfigError(
            "gpu-selftest needs the folder benchmarks/ of a checkout; run it there, after pip install -e ."
        )
    command = importlib.import_module("benchmarks.selftest.command")
    return command.selftest(out=out_folder(args.out), quick=args.quick, real=args.real)
