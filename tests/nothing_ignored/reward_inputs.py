"""What reward functions, reward servers and environments say, through what reads every such answer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfspec.actors.reward_server.score_schema import read_answer
from rlhfspec.core.errors import RewardError
from rlhfspec.learning.environments.environment_protocol import checked_step
from rlhfspec.learning.rewards.call_forms import PARTS, CannotBeCalled, call_of


def arguments(name: str, _: Any, __: Path) -> None:
    if not name.isidentifier():
        pytest.skip("no name of an argument in Python")
    for function in ("lambda response, %s: 1", "lambda completions, %s: [1]", "lambda solution_str, %s: 1"):
        made = eval(function % name)
        try:
            call_of(made).plan(())
        except CannotBeCalled as error:
            said = RewardError(f"{error}; {error.advice}")
            continue
        return
    raise said


def result(name: str, value: Any, _: Path) -> None:
    forms = {
        "value": lambda prompt, response: 1.0,
        "score": lambda solution_str: 1.0,
        "rewards": lambda queries: [1.0],
    }
    for key, function in forms.items():
        kind, words = call_of(function).answer({key: [0.5] if key == "rewards" else 0.5, name: value})
        if kind == PARTS:
            return
    raise RewardError(words)


def answer(name: str, value: Any, _: Path) -> None:
    read_answer(json.dumps({"rewards": [], name: value}).encode(), "the server")


def answered_reward(name: str, value: Any, _: Path) -> None:
    read_answer(json.dumps({"rewards": [{"value": 0.5, name: value}]}).encode(), "the server")


def step(name: str, value: Any, _: Path) -> None:
    checked_step(SimpleNamespace(**{"observation": "", "reward": 0.0, "done": False, name: value}))


def message(name: str, value: Any, _: Path) -> None:
    said = {"role": "user", "content": "a", name: value}
    checked_step(SimpleNamespace(observation=[said], reward=0.0, done=False))


FEEDS = {
    "reward.arguments": arguments,
    "reward.result": result,
    "reward.answer": answer,
    "reward.answer.rewards": answered_reward,
    "environment.step": step,
    "environment.message": message,
}
