"""Inputs of the engine server, through the functions that read every body, query and generation_config.json."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from word_chat import word_chat

from rlhfspec.cluster.serving.engine_requests import RequestReader, usual_sampling
from rlhfspec.cluster.serving.request_bodies import (
    ChatBody,
    CompletionBody,
    read_body,
    read_object,
    require_known,
)
from rlhfspec.cluster.serving.served_weights import require_same_model

MESSAGE = {"role": "user", "content": "hi"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def completion(name: str, value: Any, _: Path) -> None:
    read_body(json.dumps({"prompt": "a", name: value}).encode(), CompletionBody)


def within_completion(key: str) -> Any:
    return lambda name, value, folder: completion(key, {name: value}, folder)


def chat(body: dict[str, Any]) -> ChatBody:
    return read_body(json.dumps({"messages": [MESSAGE], **body}).encode(), ChatBody)


def message(more: dict[str, Any]) -> ChatBody:
    return chat({"messages": [MESSAGE | more]})


@cache
def reader(folder: Path) -> RequestReader:
    (folder / "config.json").write_text("{}")
    return RequestReader(word_chat(), model=str(folder), served_name="m", max_total_tokens=64)


def variables(name: str, value: Any, folder: Path) -> None:
    reader(folder).read(chat({"chat_template_kwargs": {name: value}}))


def generation_config(name: str, value: Any, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({name: value}))
    usual_sampling(str(folder))


def body_of(surface: str) -> Any:
    return lambda name, value, _: read_object(json.dumps({name: value}).encode(), surface)


def query_of(surface: str) -> Any:
    return lambda name, value, _: require_known({name: str(value)}, surface, "the query")


def updated_config(name: str, value: Any, _: Path) -> None:
    require_same_model({"hidden_size": 8, "use_cache": True}, {"hidden_size": 8, name: value}, "weights")


FEEDS = {
    "request": completion,
    "request.completion": completion,
    "request.chat": lambda name, value, _: chat({name: value}),
    "request.stream_options": within_completion("stream_options"),
    "request.response_format": within_completion("response_format"),
    "request.message": lambda name, value, _: message({name: value}),
    "request.content_part": lambda name, value, _: message(
        {"content": [{"type": "text", "text": "a", name: value}]}
    ),
    "request.tool_call": lambda name, value, _: message({"tool_calls": [CALL | {name: value}]}),
    "request.tool_call.function": lambda name, value, _: message(
        {"tool_calls": [{"function": {"name": "f", name: value}}]}
    ),
    "request.tools": lambda name, value, _: chat({"tools": [TOOL | {name: value}], "tool_choice": "none"}),
    "request.tools.function": lambda name, value, _: chat(
        {"tools": [{"type": "function", "function": {"name": "f", name: value}}], "tool_choice": "none"}
    ),
    "request.chat_template_kwargs": variables,
    "request.generation_config": generation_config,
    "request.query": query_of("request.query"),
    "request.query.pause": query_of("request.query.pause"),
    "request.update_weights": body_of("request.update_weights"),
    "request.update_info": body_of("request.update_info"),
    "request.init_weights": body_of("request.init_weights"),
    "request.updated_config": updated_config,
    "request.weight_update": body_of("request.weight_update"),
}
