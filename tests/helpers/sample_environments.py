"""Environments for tests, by import path as users name theirs."""

import ctypes
import os
import time
from pathlib import Path

import numpy as np

from rlhfspec.core.records import Prompt
from rlhfspec.learning.data.chat.messages import Tools
from rlhfspec.learning.data.chat.tool_calls import ToolCall, TurnEvent
from rlhfspec.learning.environments.environment_protocol import Step


class Parrot:
    """Says the end of a turn backwards; a turn ends behind an `a`. A pure function of what was said."""

    stop_texts = ("a",)

    def __init__(self, longest: int = 4, turns: int = 0) -> None:
        self._longest = longest
        self._turns = turns
        self.num_steps = 0

    def reset(self, prompt: Prompt) -> None:
        self.num_steps = 0

    def step(self, response: str) -> Step:
        self.num_steps += 1
        return Step(response[-self._longest :][::-1], reward=0.25, done=self.num_steps == self._turns)


class Counting(Parrot):
    """Says which step it is; its process ends once, in the second step of sample text `dies`."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self._marker = Path(marker)

    def reset(self, prompt: Prompt) -> None:
        super().reset(prompt)
        self._dies = prompt.text == "dies"

    def step(self, response: str) -> Step:
        self.num_steps += 1
        if self._dies and self.num_steps == 2 and not self._marker.exists():
            self._marker.touch()
            os._exit(1)
        return Step(f"{self.num_steps}:{response}")


class Wayward(Parrot):
    """Does what the turn says."""

    def step(self, response: str) -> Step:
        match response:
            case "hang":
                time.sleep(3600)
            case "raise":
                raise KeyError("no such tool")
            case "exit":
                raise SystemExit(3)
            case "segfault":
                ctypes.string_at(0)
            case "kill -9":
                os.kill(os.getpid(), 9)
            case "number":
                return 5  # type: ignore[return-value]
            case "nan":
                return Step("x", reward=float("nan"))
        return super().step(response)


class Calls:
    """Every turn is a call of the tool that it names."""

    def of_episode(self, text: str, *, prefill: str, tools: Tools) -> list[TurnEvent]:
        return [TurnEvent("call", call=ToolCall(text, {}))]


def leaves() -> None:
    """End the process."""
    os._exit(3)


def stays() -> str:
    """Say so."""
    return "here"


class Talking(Parrot):
    """Has something to say before the first turn."""

    def reset(self, prompt: Prompt) -> str:
        return "begin"


class NoSteps:
    """Lacks a method."""

    def reset(self, prompt: Prompt) -> None:
        pass


class Discrete:
    """A space like Gymnasium's."""

    def __init__(self, n: int, start: int) -> None:
        self.n, self.start = n, start

    def contains(self, action: int) -> bool:
        return self.start <= action < self.start + self.n


class Box:
    """A space that no text spells."""


class CountDown:
    """As Gymnasium's classes are, without the package: down to nought by one or two."""

    def __init__(self, old: bool = False, space: str = "Discrete") -> None:
        self.action_space = {"Discrete": Discrete(2, 1), "Box": Box(), "": None}[space]
        self._old = old
        self.closed = False

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        assert options is not None
        self.seed, self._left, self._num = seed, options["from"], 0
        seen = np.array([self._left, 0])
        return seen if self._old else (seen, {"seed": seed})

    def step(self, action):
        if isinstance(action, str):
            return action
        self._left, self._num = self._left - action, self._num + 1
        info = {"left": np.int64(self._left), "near": self._left < 2, "note": "a text"}
        done = (self._left <= 0,) if self._old else (self._left <= 0, False)
        return (np.array([self._left, self._num]), 0.5, *done, info)

    def close(self) -> None:
        self.closed = True


class Scoring(Parrot):
    """Scores what its limits cut by what was said."""

    def score_cut(self) -> Step:
        return Step(reward=float(self.num_steps), parts={"cut": 1.0})
