"""Environments of the package `verifiers` (to 0.3, whose packages have a `load_environment`): loading, and their rows.

Named `verifiers:NAME` or `verifiers:FILE.py`, with arguments of load_environment as `verifiers:NAME?key=value`.
"""

from __future__ import annotations

import json
import signal
from functools import cache
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qsl

from ...core.errors import ConfigError
from ...core.named_code import describe, named_code

SCHEME = "verifiers:"


def load(name: str, *, key: str, **options: Any) -> Any:
    """The environment, one of a name and options in a process. Raises ConfigError: none, or not of this kind."""
    name, _, query = name.partition("?")
    given = options | {one: _value(text) for one, text in parse_qsl(query, keep_blank_values=True)}
    return _loaded(name, json.dumps(given, sort_keys=True), key)


@cache
def _loaded(name: str, options: str, key: str) -> Any:
    module = name if name.endswith(".py") else name.rsplit("/", 1)[-1].replace("-", "_")
    maker = named_code(
        f"{module}:load_environment",
        key=key,
        kind="package with a load_environment",
        example="verifiers:wordle, an installed one, or verifiers:my_env.py (a taskset of verifiers.v1 is none)",
    )
    try:
        # each takes Ctrl-C and SIGTERM over, which are the process's, and cannot but on its main thread
        with patch.object(signal, "signal", lambda *_: None):
            found = maker(**json.loads(options))
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key} {SCHEME}{name}: load_environment with {options} raised {type(error).__name__}: {describe(error)}; "
            "fix the environment or its options"
        ) from error
    if not (callable(getattr(found, "run_rollout", None)) and hasattr(found, "rubric")):
        raise ConfigError(
            f"{key} {SCHEME}{name}: expected an Environment of verifiers 0.1.10 to 0.3, with run_rollout and a rubric, "
            f"got {type(found).__name__}"
        )
    return found


def table(name: str, split: str, key: str) -> Any:
    """Its `datasets.Dataset`, with its tools as a column. Raises ConfigError as `load`, and for a split it has not."""
    environment = load(name.removeprefix(SCHEME), key=key)
    made = {"train": environment.get_dataset, "test": environment.get_eval_dataset}
    if split not in made:
        raise ConfigError(f"data.split {split}: {name} has train and test; choose one")
    rows = made[split]()
    tools = schemas(environment)
    return rows.add_column("tools", [json.dumps(tools)] * len(rows)) if tools else rows


def schemas(environment: Any) -> list[dict[str, Any]]:
    """Its tools as a chat template is told of them, which is as its client sends them."""
    names = ("name", "description", "parameters", "strict")
    given = [{name: getattr(one, name, None) for name in names} for one in environment.tool_defs or ()]
    return [
        {"type": "function", "function": {name: value for name, value in one.items() if value is not None}}
        for one in given
    ]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
