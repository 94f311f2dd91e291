"""The environment protocol, what a step returns, and how a class is found by its import path.

The same two calls as Gymnasium's and OpenEnv's: `reset` begins an episode, `step` takes what the policy said and
answers with observation, reward and done.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from ...core.config import EnvironmentConfig
from ...core.errors import ConfigError, EpisodeError
from ...core.named_code import describe, named_code
from ...core.records import Prompt, SampleKey
from ...core.surfaces.surface import note_once, surface
from ..data.chat.tool_calls import CallParser

Message = Mapping[str, str]
Observation = str | Sequence[Message] | Sequence[int] | np.ndarray
COUNTED = ("tool_calls", "tool_calls_unparsed", "tool_calls_failed")
NAMED = {"calculator": "rlhfspec.learning.environments.calculator:Calculator"}


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers to a turn."""

    observation: Observation = ""
    "text, chat messages (`role`, `content`) or token ids; empty: the policy goes on where it stopped"
    reward: float = 0.0
    done: bool = False
    "the episode is over; the observation is not shown any more"
    parts: Mapping[str, float] = field(default_factory=dict)
    "kept beside the reward, summed over the steps; `correct` gives accuracy and pass@k"
    counts: Mapping[str, float] = field(default_factory=dict)
    "of COUNTED: summed over an iteration's steps, `rollout/NAME` in metrics.jsonl"


@runtime_checkable
class Environment(Protocol):
    """One episode. Must be a pure function of its arguments: after an actor's death the same turns are played again.

    An attribute `stop_texts`, a tuple of strings, ends a turn behind every token whose text ends with one of them,
    besides the tokenizer's end token. With an attribute `raw = True` texts go on where the policy stopped, in a chat
    inside of its own message; else they are the user's next message there. A method `require_prompt(prompt)` is called
    for every prompt before the run, and raises for one that no episode can have. A `reset` with a parameter `seed` is
    given one of the sample's key. A method `score_cut()` is called where an episode ends by its length: a Step
    whose reward and parts count. One `close()` is called when an episode is over or dropped. With
    `replays = False` it keeps nothing from step to step: after an actor's death it is asked for the last turn alone.
    """

    def reset(self, prompt: Prompt) -> str | None:
        """Begin an episode; a text that is returned is added to the prompt (in a chat, to its last message)."""
        ...

    def step(self, response: str) -> Step:
        """Answer the text of one turn, without special tokens."""
        ...


def environment_maker(
    config: EnvironmentConfig, parser: CallParser | None = None
) -> Callable[[], Environment]:
    """Return what makes one environment an episode; `parser` reads calls of tools.

    Raises ConfigError: no such class, or one that cannot be made with `environment.options`.
    """
    if config.kind == "tools":
        from .tools import tools_maker  # which takes Step from here

        return tools_maker(config, parser)
    where = f"environment.kind {config.kind}"
    found = _found(config, where, parser)

    def make() -> Environment:
        try:
            return cast(Environment, found(**config.options))
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{where}: making it with environment.options {config.options} raised {type(error).__name__}: "
                f"{describe(error)}; fix the class or its options"
            ) from error

    return make


def _found(config: EnvironmentConfig, where: str, parser: CallParser | None) -> Callable[..., Any]:
    """What makes an environment of `environment.options`."""
    from . import gym_classes, verifiers_episode  # of this protocol themselves

    kind = config.kind or ""
    scheme, _, name = kind.partition(":")
    if scheme == "verifiers":
        return verifiers_episode.maker(config, parser)
    if scheme == "gymnasium":
        registered = gym_classes.registered(name)
        return lambda **options: gym_classes.GymEpisode(registered(**options))
    found = named_code(
        NAMED.get(kind, kind),
        key="environment.kind",
        kind="class",
        example=f"my_tools:Shop for the class Shop in my_tools.py, or one of: {', '.join(NAMED)}, tools",
    )
    if not (inspect.isclass(found) and callable(getattr(found, "reset", None)) and hasattr(found, "step")):
        raise ConfigError(f"{where}: expected a class with the methods reset and step, got {found!r}")
    if not gym_classes.is_gym(found):
        return found
    note_once(f"{where}: reset takes no prompt, so it is Gymnasium's: observations and actions are texts")
    return lambda **options: gym_classes.GymEpisode(found(**options))


def begun(environment: Environment, prompt: Prompt, key: SampleKey) -> str | None:
    """Reset an environment for a sample. Raises EpisodeError for what is neither a text nor None."""
    reset: Callable[..., Any] = environment.reset
    if "seed" not in inspect.signature(reset).parameters:
        return checked_reset(reset(prompt))
    name = f"{key.run_seed} {key.stream} {key.sample_index}".encode()
    return checked_reset(reset(prompt, seed=int.from_bytes(hashlib.sha256(name).digest()[:4], "big")))


def scores_cut(environment: Environment) -> bool:
    """Whether an episode that ends by its length has a further Step."""
    return callable(getattr(environment, "score_cut", None))


def closed(environment: Environment) -> None:
    """Let an environment go; what its `close` raises is no episode's any more."""
    with suppress(Exception):
        getattr(environment, "close", lambda: None)()


def stop_texts(environment: Environment) -> tuple[str, ...]:
    """Return the texts that end a turn. Raises ConfigError for what is no tuple of strings."""
    texts: Any = getattr(environment, "stop_texts", ())
    if not isinstance(texts, tuple) or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(
            f"{type(environment).__name__}.stop_texts: expected a tuple of strings, got {texts!r}; fix the class"
        )
    return texts


def is_raw(environment: Environment) -> bool:
    """Whether texts go on where the policy stopped, in a chat too. Raises ConfigError for what is no bool."""
    raw: Any = getattr(environment, "raw", False)
    if not isinstance(raw, bool):
        raise ConfigError(
            f"{type(environment).__name__}.raw: expected True or False, got {raw!r}; fix the class"
        )
    return raw


def prompt_check(environment: Environment) -> Callable[[Prompt], object] | None:
    """Return what raises for a prompt that no episode can have; None: the class does not say."""
    check = getattr(environment, "require_prompt", None)
    return check if callable(check) else None


def misspelt_attributes(environment: Environment) -> list[str]:
    """A line for each attribute of the class that is near to one that is read, or to a limit of the config."""
    kind, limits = type(environment), ("max_turns", "max_turn_tokens", "timeout_s")
    lines = []
    for name, held in ((name, held) for one in kind.__mro__[:-1] for name, held in vars(one).items()):
        known = ("require_prompt",) if callable(held) else ("stop_texts", "raw", "replays", *limits)
        near = difflib.get_close_matches(name, known, 1, 0.8)
        if near and (near[0] != name or name in limits):
            meant = f"environment.{near[0]} of the config" if near[0] in limits else f"'{near[0]}'"
            lines.append(
                f"environment {kind.__name__} has '{name}', which nothing here reads: is it {meant}?"
            )
    return lines


def checked_reset(first: Any) -> str | None:
    """Return what a reset adds to the prompt. Raises EpisodeError for what is neither a text nor None."""
    if not isinstance(first, str | None):
        raise EpisodeError(f"expected reset to return None or a text, got {type(first).__name__}")
    return first


def checked_step(step: Any) -> Step:
    """Return a step whose every part is what it must be, token ids as int64. Raises EpisodeError saying what is not."""
    names = ("observation", "reward", "done")
    if not all(hasattr(step, name) for name in names):
        raise EpisodeError(f"expected a Step with {', '.join(names)}, got {type(step).__name__}")
    if type(step) is not Step:
        held = {*getattr(step, "__dict__", ()), *getattr(step, "__slots__", ())}
        said = {name: getattr(step, name, None) for name in held}
        surface("environment.step").require(said, f"a {type(step).__name__}", error=EpisodeError)
    try:
        reward = float(step.reward + 0)  # a text is no number, whatever it spells
    except (TypeError, ValueError):
        raise EpisodeError(f"expected a number as reward, 0.0 for none, got {step.reward!r}") from None
    if not (isinstance(step.done, bool | int | float) or getattr(step.done, "shape", None) == ()):
        raise EpisodeError(f"expected True or False as done, got {step.done!r}")
    if not math.isfinite(reward):
        raise EpisodeError(f"expected a finite reward, got {reward}")
    observation = _checked_observation(step.observation)
    parts, counts = (_checked_parts(getattr(step, name, None)) for name in ("parts", "counts"))
    if unknown := counts.keys() - {*COUNTED}:
        raise EpisodeError(
            f"expected counts of {', '.join(COUNTED)}, got {', '.join(unknown)}; let parts hold them"
        )
    return Step(observation, reward, bool(step.done), parts, counts)


def _checked_parts(parts: Any) -> dict[str, float]:
    try:
        checked = {str(name): float(value) for name, value in dict(parts or {}).items()}
    except (TypeError, ValueError):
        raise EpisodeError(f"expected parts as a mapping of names to numbers, got {parts!r}") from None
    if not all(math.isfinite(value) for value in checked.values()):
        raise EpisodeError(f"expected finite parts, got {parts!r}")
    return checked


def _checked_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EpisodeError(f"expected an observation that UTF-8 can hold, got {error}") from None
    return text


def _checked_observation(observation: Any) -> Observation:
    if observation is None:
        return ""
    if isinstance(observation, str):
        return _checked_text(observation)
    if isinstance(observation, (list, tuple)) and observation and isinstance(observation[0], Mapping):
        if all(
            isinstance(one, Mapping) and {"role", "content"} <= set(one) and isinstance(one["content"], str)
            for one in observation
        ):
            for one in observation:
                surface("environment.message").require(one, "a message", error=EpisodeError)
                _checked_text(one["content"])
            return [dict(one) for one in observation]
        raise EpisodeError("expected messages as mappings with role and content, the content a string")
    try:
        ids = np.asarray(observation if len(observation) else np.zeros(0, dtype=np.int64))
    except (TypeError, ValueError):
        ids = np.zeros((0, 0))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise EpisodeError(
            f"expected an observation as text, messages or token ids, got {type(observation).__name__}"
        )
    return ids.astype(np.int64)
