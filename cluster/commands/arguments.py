"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_config_arguments(parser: argparse.ArgumentParser, *, default: Path | None = None) -> None:
    """Add --config (required unless there is a default) and --set."""
    parser.add_argument(
        "--config",
        type=Path,
        required=default is None,
        default=default,
        metavar="FILE",
        help="YAML file; configs/ holds examples, core/config.py every key with its default and meaning",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key of the file, such as run.iterations=5; may be repeated",
    )
