"""Arguments that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from ...core.errors import ConfigError
from ...core.outside import cut, try_folder, user_path
from ..ray_start.machine import Gpus
from .declare import Arg


def number(
    words: str, convert: type[int] | type[float], holds: Callable[[float], bool]
) -> Callable[[str, str], float]:
    """How a flag's number is read; it raises ConfigError, `--flag expects WORDS`, where `holds` is false of it."""

    def parse(flag: str, text: str) -> float:
        with suppress(ValueError):
            value = convert(text)
            if holds(value):
                return value
        raise ConfigError(f"{flag} expects {words}, got {cut(text)}")

    return parse


SECONDS = number("seconds above 0", float, lambda value: 0 < value < math.inf)
SEED = number("a number from 0 to 2**63 - 1", int, lambda value: 0 <= value < 2**63)
COUNT = number("a whole number above 0", int, lambda value: value >= 1)


def gpus(flag: str, text: str) -> Gpus:
    """How many GPUs, and the GiB of each. Raises ConfigError."""
    count, _, gib = text.partition("x")
    with suppress(ValueError, OverflowError):
        found = Gpus(int(count), int(float(gib) * 2**30))
        if min(found.number, found.each_bytes) > 0:
            return found
    raise ConfigError(f"{flag} expects how many GPUs and the GiB of each, such as 8x79, got {cut(text)}")


def folder(flag: str, text: str) -> Path:
    """The absolute path of a folder to write to. Raises ConfigError where none can be made: before the work."""
    path = user_path(text).resolve()
    try:
        try_folder(path)
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: no folder can be made there: {error.strerror}; name one that you may write to"
        ) from None
    return path


def set_flag(help: str) -> Arg:
    """The flag `--set`."""
    return Arg("KEY=VALUE", f"{help}; may be repeated", flag="--set")


ConfigFile = Annotated[
    Path,
    Arg(
        "FILE",
        "YAML file; configs/ holds examples, docs/reference/config.md every key with its default and meaning",
    ),
]
Overrides = Annotated[list[str], set_flag("override one key of the file, such as run.iterations=5")]
RunFolder = Annotated[Path, Arg("DIR", "the run folder, new (default: one in run.output_dir, with the time)")]
