"""Plays environments of the package `verifiers` by given answers; prints one JSON line. Its folder is on the path."""

from __future__ import annotations

import json
import signal

import numpy as np

from rlhfspec.core.config import EnvironmentConfig
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import ConfigError, DataError
from rlhfspec.core.records import Prompt, SampleKey
from rlhfspec.learning.data.chat.messages import Tools
from rlhfspec.learning.data.chat.tool_calls import ToolCall, TurnEvent
from rlhfspec.learning.data.prompt_rows import read_rows
from rlhfspec.learning.environments.environment_protocol import begun, closed, environment_maker
from rlhfspec.learning.environments.tools import tool_schemas

NAME = "verifiers:sample_verifiers"


class Calls:
    """Reads `CALL name` as a call."""

    def of_episode(self, text: str, *, prefill: str, tools: Tools) -> list[TurnEvent]:
        content, _, name = text.partition("CALL ")
        call = TurnEvent("call", call=ToolCall(name, {"a": 1, "b": 1}))
        return [TurnEvent("content", content), *([call] if name else [])]


def play(kind: str, says: list[str], *, cut: bool = False) -> list:
    """Observation, reward, done and parts of each step."""
    config = EnvironmentConfig(kind=NAME, options={"kind": kind})
    tools = tool_schemas(config)
    episode = environment_maker(config, Calls() if tools else None)()
    row = rows[2]
    prompt = Prompt(
        prompt_id=2,
        token_ids=np.arange(2),
        reference=row.reference,
        messages=row.messages,
        fields=row.fields,
        tools=tools,
    )
    episode.require_prompt(prompt)
    steps = [begun(episode, prompt, SampleKey(run_seed=1, sample_index=2))]
    for text in says:
        step = episode.step(text)
        steps.append([step.observation, step.reward, step.done, step.parts])
    if cut:
        step = episode.score_cut()
        steps.append([step.observation, step.reward, step.done, step.parts])
    closed(episode)
    return steps


def refused(kind: str, fields: dict) -> str:
    """What is said of a kind, or of a prompt."""
    try:
        episode = environment_maker(EnvironmentConfig(kind=NAME, options={"kind": kind}))()
        episode.require_prompt(
            Prompt(prompt_id=0, token_ids=np.arange(2), messages=(("user", "x"),), fields=fields)
        )
    except (ConfigError, DataError) as error:
        return str(error)
    return ""


before = signal.getsignal(signal.SIGTERM)
data = {"path": f"{NAME}?rows=3", "messages_field": "prompt", "reward_fields": ["question", "info"]}
rows = read_rows(config_from_dict({"data": data, "models": {"target": "x", "draft": "y"}}).data)
print(
    json.dumps(
        {
            "rows": [[row.messages, row.reference, row.fields] for row in rows],
            "multi": play("multi", ["7", "is it 2"]),
            "tools": play("tools", ["CALL add", "CALL none", "it is 2"]),
            "single": play("single", ["2"]),
            "cut": play("multi", ["7"], cut=True),
            "again": play("multi", ["7", "is it 2"]),
            "group": refused("group", {}),
            "no info": refused("multi", {"question": "x"}),
            "signals": signal.getsignal(signal.SIGTERM) == before,
        }
    )
)
