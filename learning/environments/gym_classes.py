"""Gymnasium's classes as they lie: observation and action as text, info's numbers as parts.

Source: Gymnasium's Env API (reset -> observation, info; step -> observation, reward, terminated, truncated, info), and
Gym's of before 0.26 (reset -> observation; step -> observation, reward, done, info). A text that is no action of a
Discrete space takes no step: the policy is told so, and a part counts it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ...core.errors import ConfigError, EpisodeError
from ...core.named_code import describe
from ...core.records import Prompt
from .environment_protocol import Step

INVALID = "invalid_actions"


def is_gym(found: Any) -> bool:
    """Whether a class's reset begins without a prompt."""
    parameters = [*inspect.signature(found.reset).parameters.values()][1:]
    by_place = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL)]
    return not by_place or by_place[0].name == "seed"


def registered(name: str) -> Callable[..., Any]:
    """What makes the environment that Gymnasium knows by a name. Raises ConfigError: it is not installed."""
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ImportError as error:
        raise ConfigError(
            f"environment.kind gymnasium:{name}: Gymnasium cannot be imported ({describe(error)}); install gymnasium"
        ) from None
    return lambda **options: gymnasium.make(name, **options)


class GymEpisode:
    """One episode of such a class; a new object of it each."""

    def __init__(self, environment: Any) -> None:
        """Raises ConfigError: a space of actions that no text spells."""
        self._environment = environment
        space: Any = getattr(environment, "action_space", None)
        kind = type(space).__name__
        if space is not None and kind not in ("Discrete", "Text"):
            raise ConfigError(
                f"{type(environment).__name__}.action_space is {kind}; expected Discrete (the turn is a whole number), "
                "Text, or none (the turn's text is the action); wrap the class in one whose step reads a text"
            )
        self._space: Any = space
        self._is_number = kind == "Discrete"
        reset = inspect.signature(environment.reset).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in reset.values())
        self._given = [name for name in ("seed", "options") if takes_all or name in reset]
        self.stop_texts = getattr(environment, "stop_texts", ())
        self.raw = getattr(environment, "raw", False)

    def reset(self, prompt: Prompt, seed: int) -> str:
        """Begin; `options` are the row's prompt, reference and data.reward_fields."""
        row = {"prompt": prompt.text, "reference": prompt.reference, **prompt.fields}
        values = {"seed": seed, "options": row}
        first = self._environment.reset(**{name: values[name] for name in self._given})
        has_info = isinstance(first, tuple) and len(first) == 2 and isinstance(first[1], Mapping)
        text = _text(first[0] if has_info else first)
        return f"\n{text}" if text and not prompt.read_text[-1:].isspace() else text

    def step(self, response: str) -> Step:
        """Take an action. Raises EpisodeError for what is no step of either API."""
        action = self._action(response)
        if action is None:
            low = int(getattr(self._space, "start", 0))
            most = (
                f"a whole number from {low} to {low + int(self._space.n) - 1}"
                if self._is_number
                else self._space
            )
            said = f"not an action: {response.strip()[:60]!r}, expected {most}"
            return Step(said, parts={INVALID: 1.0})
        answer = self._environment.step(action)
        if not (isinstance(answer, tuple) and len(answer) in (4, 5) and isinstance(answer[-1], Mapping)):
            raise EpisodeError(
                "expected step to return (observation, reward, terminated, truncated, info), or (observation, reward, "
                f"done, info), got {type(answer).__name__}{len(answer) if isinstance(answer, tuple) else ''}"
            )
        observation, reward, *done, info = answer
        parts = {} if self._space is None else {INVALID: 0.0}
        parts |= {str(name): float(value) for name, value in info.items() if _is_number(value)}
        return Step(_text(observation), float(reward), any(map(bool, done)), parts)

    def close(self) -> None:
        """Let what the environment holds go."""
        getattr(self._environment, "close", lambda: None)()

    def _action(self, response: str) -> Any:
        """What the text asks for; None where that is no action."""
        if not self._is_number:
            return response if self._space is None or self._space.contains(response) else None
        try:
            action = int(response.strip())
        except ValueError:
            return None
        return action if self._space.contains(action) else None


def _text(observation: Any) -> str:
    return "" if observation is None else observation if isinstance(observation, str) else str(observation)


def _is_number(value: Any) -> bool:
    """A number or an array's only one; the rest of info is notes that nobody learns from."""
    return isinstance(value, bool | int | float) or getattr(value, "shape", None) == ()
