"""The user's own code by its import path, `package.module:name`: functions, classes."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

from core.errors import ConfigError, one_line

_MAX_CHARS = 200


def named_code(path: str, *, key: str, kind: str, example: str) -> Any:
    """What the path names; its module is imported, from the current folder too.

    Args:
        path: `package.module:name`.
        key: the setting that says so, for messages.
        kind: what is expected, such as `function`.
        example: a path and what it means, for messages.

    Raises:
        ConfigError: no such path, module or name, or a module that cannot be imported.
    """
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise ConfigError(
            f"{key} '{path}' names no {kind}: expected package.module:{kind}, such as {example}"
        )
    import_from_too(os.getcwd())  # the console script leaves it out
    try:
        return vars(importlib.import_module(module_name))[name]
    except (ModuleNotFoundError, SyntaxError) as error:
        raise ConfigError(
            f"{key} {path}: cannot import {module_name}: {describe(error)}; run from the folder that holds it, or put "
            "it on PYTHONPATH"
        ) from error
    except KeyError:
        raise ConfigError(f"{key} {path}: {module_name} has no '{name}'; check the name") from None
    except (Exception, SystemExit) as error:  # the module runs whatever the user wrote
        raise ConfigError(
            f"{key} {path}: importing {module_name} raised {type(error).__name__}: {describe(error)} "
            f"({place_of(error)}); mend the module"
        ) from error


def import_from_too(folder: str | None) -> None:
    """Let this process import the user's code from a folder; last, so that it shadows nothing of ours."""
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)


def describe(error: BaseException) -> str:
    """An error's message as one line, cut where it is long."""
    return one_line(str(error))[:_MAX_CHARS]


def place_of(error: BaseException) -> str:
    """File and line of the user's code that raised, as far as it is known."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}" if frames else "no line known"
