"""A reward from the user's own Python function, `package.module:function`.

Signature: `f(prompt: str, response: str, reference: str) -> float | dict` with the reward under
"value" and any further finite numbers as parts.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from core.errors import ConfigError, RewardError
from core.records import Prompt, Reward


class UserReward:
    """Calls the user's function once a response."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._function = _import_function(path)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Reward]:
        """Score one response a prompt, in order.

        Raises RewardError, naming the prompt and the place in the batch, when the function raises or
        returns something that is not finite.
        """
        pairs = zip(prompts, responses, strict=True)
        return [self._score_one(index, prompt, response) for index, (prompt, response) in enumerate(pairs)]

    def _score_one(self, index: int, prompt: Prompt, response: str) -> Reward:
        where = f"reward function {self.path}, sample {index} of the batch (prompt {prompt.prompt_id})"
        shown = f"response began '{response[:60]}'"
        try:
            result = self._function(prompt.text, response, prompt.reference)
        # the user's code may raise anything, and sys.exit would end the actor; we say where
        except (Exception, SystemExit) as error:
            raise RewardError(
                f"{where} raised {type(error).__name__}: {one_line(error)}; {shown}; mend the function"
            ) from error
        if isinstance(result, Mapping):
            if "value" not in result:
                raise RewardError(f"{where} returned a dict without 'value'; got keys {sorted(result)}")
            parts = {str(k): _finite(v, f"{where}, part '{k}'", shown) for k, v in result.items()}
            return Reward(value=parts.pop("value"), parts=parts)
        return Reward(value=_finite(result, where, shown))


def _finite(value: Any, where: str, shown: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"{where} returned {value!r}; expected a finite number; {shown}; mend the function"
        ) from error
    if not math.isfinite(number):
        raise RewardError(f"{where} returned {number}; expected a finite number; {shown}; mend the function")
    return number


def _import_function(path: str) -> Callable[[str, str, str], Any]:
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise ConfigError(
            f"reward.kind '{path}' names no function: expected package.module:function, such as "
            "my_rewards:score for the function score in my_rewards.py"
        )
    caller = os.getcwd()  # the console script leaves it out; last, so that nothing of ours is shadowed
    if caller not in sys.path:
        sys.path.append(caller)
    try:
        function = vars(importlib.import_module(module_name))[name]
    except (ModuleNotFoundError, SyntaxError) as error:
        raise ConfigError(
            f"reward.kind {path}: cannot import {module_name}: {error}; "
            "run from the folder that holds it, or put it on PYTHONPATH"
        ) from error
    except KeyError:
        raise ConfigError(f"reward.kind {path}: {module_name} has no '{name}'; check the name") from None
    except (Exception, SystemExit) as error:  # the module runs whatever the user wrote
        raise ConfigError(
            f"reward.kind {path}: importing {module_name} raised {type(error).__name__}: {one_line(error)} "
            f"({_place(error)}); mend the module"
        ) from error
    if not callable(function):
        raise ConfigError(f"reward.kind {path}: '{name}' is {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind("prompt", "response", "reference")
    except TypeError as error:
        raise ConfigError(
            f"reward.kind {path}: '{name}' cannot be called as {name}(prompt, response, reference): {error}; "
            "give it these three arguments"
        ) from error
    except ValueError:
        pass  # a function of C without a signature; its first call will tell
    return function


def one_line(error: BaseException) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split())[:200]


def _place(error: BaseException) -> str:
    """File and line of the user's code that raised, as far as it is known."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}" if frames else "no line known"
