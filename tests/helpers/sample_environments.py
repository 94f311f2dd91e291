"""Environments for tests, by import path as users name theirs."""

import os
import time
from pathlib import Path

from rlhfspec.core.records import Prompt
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
            case "number":
                return 5  # type: ignore[return-value]
            case "nan":
                return Step("x", reward=float("nan"))
        return super().step(response)


class Talking(Parrot):
    """Has something to say before the first turn."""

    def reset(self, prompt: Prompt) -> str:
        return "begin"


class NoSteps:
    """Lacks a method."""

    def reset(self, prompt: Prompt) -> None:
        pass
