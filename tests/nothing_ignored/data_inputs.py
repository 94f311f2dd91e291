"""Rows, messages, tools and template variables, through what reads them for prompts, `sft` and `train-reward`."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

from word_chat import PLAIN, word_chat

from rlhfspec.core.config import DataConfig
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.settings.supervised import DemonstrationsConfig, PreferencesConfig
from rlhfspec.learning.data.preferences import encode_preferences
from rlhfspec.learning.data.prompts import load_prompts
from rlhfspec.learning.data.supervised_rows import encode_demonstrations, read_raw_rows

USER, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "me"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
TELLING = "{{ tools | tojson if tools }}" + PLAIN.replace(
    "{{ m.content }}", "{{ m.content }} {{ m.tool_calls | tojson if m.tool_calls }}"
)


@cache
def tokenizer(template: str) -> Any:
    return word_chat(template)


def written(folder: Path, row: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return str(path)


def sft(folder: Path, row: dict[str, Any], template: str = TELLING) -> None:
    data = DemonstrationsConfig(path=written(folder, row), eval_share=0.0)
    rows, _ = read_raw_rows(data, seed=0)
    encode_demonstrations(rows, data, tokenizer(template))


def prompts(folder: Path, row: dict[str, Any], **settings: Any) -> None:
    data = DataConfig(path=written(folder, row), **settings)
    for line in load_prompts(data, tokenizer(TELLING), seed=0).notes():
        logging.getLogger(__name__).warning(line)


def preference(name: str, value: Any, folder: Path) -> None:
    row = {"prompt": [USER], "chosen": [SAID], "rejected": [SAID | {"content": "no"}], name: value}
    data = PreferencesConfig(path=written(folder, row), eval_share=0.0)
    rows, _ = read_raw_rows(data, seed=0)
    encode_preferences(rows, data, tokenizer(PLAIN))


def message(name: str, value: Any, folder: Path) -> None:
    for row in ({"messages": [USER | {name: value}, SAID]}, {"messages": [USER, SAID | {name: value}]}):
        sft(folder, row, PLAIN)


def part(name: str, value: Any, folder: Path) -> None:
    sft(folder, {"messages": [USER | {"content": [{"text": "hi", name: value}]}, SAID]})


def call(one: dict[str, Any], folder: Path) -> None:
    sft(folder, {"messages": [USER, SAID | {"tool_calls": [one]}], "tools": [TOOL]})


def tool(one: dict[str, Any], folder: Path) -> None:
    prompts(folder, {"messages": [USER], "tools": [one]}, reference_field=None)


def variables(name: str, value: Any, folder: Path) -> None:
    row = {"question": "hi", "answer": "me"}
    data = {"path": written(folder, row), "chat": True, "chat_template_kwargs": {name: value}}
    pair = {"models": {"target": "demo", "draft": "demo"}}
    load_prompts(config_from_dict({**pair, "data": data}).data, tokenizer(PLAIN), seed=0)


def needed(name: str, value: Any, folder: Path) -> None:
    if not name.isidentifier():  # no template reads it, so it may be given alone
        return variables(name, value, folder)
    return sft(folder, {"messages": [USER, SAID]}, PLAIN + "{{ " + name + " }}")


FEEDS = {
    "message": message,
    "message.part": part,
    "message.call": lambda name, value, folder: call(CALL | {name: value}, folder),
    "message.call.function": lambda name, value, folder: call(
        {"function": CALL["function"] | {name: value}}, folder
    ),
    "role": lambda name, _, folder: sft(folder, {"messages": [USER, {"role": name, "content": "hi"}, SAID]}),
    "tool": lambda name, value, folder: tool(TOOL | {name: value}, folder),
    "tool.function": lambda name, value, folder: tool({"function": TOOL["function"] | {name: value}}, folder),
    "chat_template": needed,
    "chat_template_kwargs": variables,
    "row.prompt": lambda name, value, folder: prompts(
        folder, {"question": "hi", "answer": "me", name: value}
    ),
    "row.sft": lambda name, value, folder: sft(folder, {"prompt": "hi", "completion": "me", name: value}),
    "row.preference": preference,
}
