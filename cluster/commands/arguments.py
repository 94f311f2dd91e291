"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from core.errors import ConfigError
from core.outside import try_folder


def add_config_arguments(parser: argparse.ArgumentParser, *, default: Path | None = None) -> None:
    """Add --config (required unless there is a default) and --set."""
    parser.add_argument(
        "--config",
        type=path_argument,
        required=default is None,
        default=default,
        metavar="FILE",
        help="YAML file; configs/ holds examples, core/settings/ every key with its default and meaning",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key of the file, such as run.iterations=5; may be repeated",
    )


def path_argument(text: str) -> Path:
    """A path given by the user, `~` and `~user` resolved. Raises ConfigError for a home that is not known."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"the home folder that '{text}' begins with is not known; give the whole path"
        ) from None


def budget_argument(text: str) -> float:
    """Seconds of `--budget`. Raises ConfigError unless they are a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"--budget expects seconds above 0, got {text}")
    return value


def out_folder(path: Path) -> Path:
    """The absolute path of `--out DIR`. Raises ConfigError where no folder can be made: before the work, not after."""
    path = path.resolve()
    try:
        try_folder(path)
    except OSError as error:
        raise ConfigError(
            f"--out {path}: no folder can be made there: {error.strerror}; name one that you may write to"
        ) from None
    return path
