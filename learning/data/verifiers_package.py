"""Environments of the package `verifiers` (0.1.14 to 0.3.1, whose packages have a `load_environment`), and their rows.

Named `verifiers:NAME` or `verifiers:FILE.py`; as `data.path` with arguments, `verifiers:NAME?key=value`.
"""

from __future__ import annotations

import importlib
import json
import signal
from functools import cache
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qsl

from ...core.config import EnvironmentConfig
from ...core.errors import ConfigError
from ...core.named_code import describe, named_code
from .chat.messages import Tools

SCHEME = "verifiers:"


def of(config: EnvironmentConfig) -> Any:
    """The environment that `environment.kind` names. Raises ConfigError as `load`."""
    return load(config.kind or "", json.dumps(config.options, sort_keys=True), "environment.kind")


@cache
def load(path: str, options: str, key: str) -> Any:
    """One of a name and options (JSON) in a process. Raises ConfigError: none, or not of this kind."""
    name = path.removeprefix(SCHEME)
    try:
        importlib.import_module("verifiers.clients")
    except ImportError as error:
        raise ConfigError(
            f"{key} {path}: expected the package verifiers 0.1.14 to 0.3.1, whose environments have a load_environment "
            f"(tasksets of 0.4 run programs of their own), got: {describe(error)}; pip install 'verifiers<0.4'"
        ) from None
    maker = named_code(
        f"{name if name.endswith('.py') else name.rsplit('/', 1)[-1].replace('-', '_')}:load_environment",
        key=key,
        kind="package with a load_environment",
        example="verifiers:wordle, an installed one, or verifiers:my_env.py",
    )
    try:
        # each takes Ctrl-C and SIGTERM over, which are the process's, and cannot but on its main thread
        with patch.object(signal, "signal", lambda *_: None):
            return maker(**json.loads(options))
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key} {path}: load_environment with {options} raised {type(error).__name__}: {describe(error)}; "
            "fix the environment or its options"
        ) from error


def table(path: str, split: str, key: str) -> Any:
    """Its `datasets.Dataset`. Raises ConfigError as `load`, and for a split it has not."""
    name, _, query = path.partition("?")
    given = {one: _value(text) for one, text in parse_qsl(query, keep_blank_values=True)}
    environment = load(name, json.dumps(given, sort_keys=True), key)
    made = {"train": environment.get_dataset, "test": environment.get_eval_dataset}
    if split not in made:
        raise ConfigError(f"data.split {split}: {name} has train and test; choose one")
    return made[split]()


def schemas(tools: Any) -> Tools:
    """Its `tool_defs` as a chat template is told of them."""
    names = ("name", "description", "parameters")
    return tuple(
        {"type": "function", "function": {name: getattr(one, name) for name in names}} for one in tools or ()
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
