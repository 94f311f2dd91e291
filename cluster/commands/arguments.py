"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError
from core.outside import cut, try_folder

if TYPE_CHECKING:
    from core.settings.supervised import SupervisedConfig


def add_config_arguments(
    parser: argparse.ArgumentParser, *, default: Path | None = None, required: bool = True
) -> None:
    """Add --config (where `required`, it may be left out only with a default) and --set."""
    parser.add_argument(
        "--config",
        type=path_argument,
        required=required and default is None,
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


def add_run_folder_argument(parser: argparse.ArgumentParser) -> None:
    """Add --out of commands that make a run folder."""
    parser.add_argument(
        "--out",
        type=path_argument,
        metavar="DIR",
        help="the run folder, new (default: one in run.output_dir, with the time)",
    )


def add_like_argument(parser: argparse.ArgumentParser) -> None:
    """Add --like, for plans of models that only the cluster has."""
    parser.add_argument(
        "--like",
        action="append",
        default=[],
        metavar="ROLE=DIR",
        help="where a model (target, draft, reward) cannot be read here: one of the same shape, its config.json alone; "
        "may be repeated",
    )


def add_supervised_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `sft` and `train-reward` take: a config, or the three things that have no default, or a run."""
    parser.add_argument(
        "--config", type=path_argument, metavar="FILE", help="YAML file; keys: core/settings/supervised.py"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="path, hub name or known name of the model (model.name)"
    )
    parser.add_argument("--data", metavar="FILE", help="the rows (data.path)")
    add_run_folder_argument(parser)
    parser.add_argument(
        "--resume",
        type=path_argument,
        metavar="DIR",
        help="go on with this run folder from its last state, by its own config",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key, such as trainer.epochs=3; may be repeated",
    )


def run_supervised(kind: type[SupervisedConfig], args: argparse.Namespace) -> int:
    """Run one of those two commands. Raises InputError for bad input."""
    from core.config_io import load_config_of

    if args.resume is not None and (args.config or args.out or args.model or args.data):
        raise ConfigError(
            "--resume goes on with a run by its own config; expected no --config, --out, --model or --data beside it; "
            "change keys with --set"
        )
    path = args.config if args.resume is None else _own_config(kind, args.resume)
    for name in (args.model, args.data):
        # a home that is not known is refused here
        _ = None if name is None else path_argument(name)
    keys = (("model", "name", args.model), ("data", "path", args.data))
    given: dict[str, dict[str, Any]] = {
        section: {key: value} for section, key, value in keys if value is not None
    }
    config = load_config_of(kind, path, args.set, given=given)
    from cluster.preflight.absolute_paths import with_absolute_paths

    config = with_absolute_paths(config, Path.cwd())
    # what takes seconds to load comes after what may be mistyped
    from cluster.reporting.console import Reporter
    from cluster.supervised.supervised_run import resume_supervised, train_supervised

    report = Reporter()
    try:
        if args.resume is not None:
            resume_supervised(config, report, folder=args.resume)
        else:
            train_supervised(config, report, out=None if args.out is None else out_folder(args.out))
    finally:
        report.stop()
    return 0


def _own_config(kind: type[SupervisedConfig], folder: Path) -> Path:
    """The config that a run folder holds. Raises ConfigError: it is none, or one of another command."""
    from cluster.resuming.own_config import kept_config
    from cluster.run_folder.layout import RunDir
    from core.config_io import load_config_of

    file = RunDir.open(folder).config_file
    try:
        load_config_of(kind, file)
    except ConfigError as error:
        raise ConfigError(
            f"{folder} is no run of this command, or one of another version, and cannot be resumed: {error}"
            f"{kept_config(file.parent / 'checkpoints')}"
        ) from None
    return file


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


def seed_argument(text: str) -> int:
    """A number of `--seed`. Raises ConfigError unless it is one that `run.seed` takes too."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**63:
        raise ConfigError(f"--seed expects a number from 0 to 2**63 - 1, got {cut(text)}")
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
