"""Conversations: lists of {role, content} as TRL, verl, LMSYS and ShareGPT write them.

A prompt ends where the model is to answer: assistant turns at the end are cut off.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import DataError
from core.outside import cut
from learning.data.whole_turns import Turn, turn_list, turn_of

Messages = tuple[tuple[str, str], ...]

ROLES = ("system", "developer", "user", "assistant", "tool")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is asked of the model, and what was answered."""

    turns: tuple[Turn, ...]
    "whole, up to the last one that is to be answered"
    answer: str
    "that followed; empty for none"


def looks_like_messages(value: Any) -> bool:
    """True for a list whose first item is a mapping, in whatever form `turn_list` reads."""
    value = turn_list(value)
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], dict)


def is_blank(text: str) -> bool:
    """True for a text of which nothing is seen: no character but white space and what has no width."""
    return all(char.isspace() or unicodedata.category(char) in ("Cf", "Cc") for char in text)


def require_whole_text(text: str, what: str) -> str:
    """Return `text`. Raises DataError for half of a surrogate pair, which no tokenizer takes."""
    if half := _SURROGATE.search(text):
        raise DataError(
            f"{what} must be text, got half of a surrogate pair at character {half.start() + 1}; mend the escape"
        )
    return text


def parse_conversation(value: Any, what: str, *, padded: bool = False) -> Conversation:
    """Return the turns up to the last one that is to be answered, and the answer that followed.

    Args:
        value: what stands in the row.
        what: names row and field in messages of errors.
        padded: it comes of columns, where every object has all keys that any has.

    Raises:
        DataError: no list of {role, content}, a role that is not known, a content that is no text, nothing to answer.
    """
    value = turn_list(value)
    if not isinstance(value, list | tuple):
        raise DataError(f"{what} must be a list of {{role, content}}, got {type(value).__name__}")
    turns = [_turn(item, f"{what}, message {number}", padded) for number, item in enumerate(value)]
    answer = ""
    while turns and turns[-1]["role"] == "assistant":
        answer = turns.pop()["content"]
    if not turns or turns[-1]["role"] not in ("user", "tool"):
        last = f"a {turns[-1]['role']} turn" if turns else "no turn"
        raise DataError(
            f"{what} has nothing to answer: expected a last turn of a user (or a tool), got {last} "
            "before the assistant's; mend the row, or leave it out by data.filter"
        )
    if turns[-1]["role"] == "user" and is_blank(turns[-1]["content"]):
        raise DataError(
            f"{what}: the last turn is empty; expected text to answer, or leave it out by data.filter"
        )
    return Conversation(tuple(turns), answer)


def parse_messages(value: Any, what: str) -> tuple[Messages, str]:
    """The same as role and content alone, and the answer."""
    found = parse_conversation(value, what)
    return pairs_of(found.turns), found.answer


def pairs_of(turns: Sequence[Turn]) -> Messages:
    """Role and content of each."""
    return tuple((turn["role"], turn["content"]) for turn in turns)


def readable(messages: Messages) -> str:
    """Return the turns as text: the user's words alone where nobody else but a system prompt speaks."""
    spoken = [turn for turn in messages if turn[0] not in ("system", "developer")]
    if len(spoken) == 1:
        return spoken[0][1]
    return "\n\n".join(f"{role}: {content}" for role, content in messages)


def as_dicts(messages: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """The form that chat templates take."""
    return [{"role": role, "content": content} for role, content in messages]


def _turn(item: Any, what: str, padded: bool) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise DataError(f"{what} must be an object with role and content, got {type(item).__name__}")
    turn = turn_of(item, what, padded=padded)
    role = turn.get("role")
    if role not in ROLES:
        got = f"'{cut(role)}'" if isinstance(role, str) else type(role).__name__
        raise DataError(f"{what} has an unknown role: expected one of {', '.join(ROLES)}, got {got}")
    content = require_whole_text(_text(turn.get("content"), what), f"{what}: its content")
    others = {key: held for key, held in turn.items() if key not in ("role", "content")}
    if others:
        _require_plain(others, what)
    return {"role": role, "content": content, **others}


def _text(content: Any, what: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):  # OpenAI's parts
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if content and all(isinstance(part, str) for part in parts):
            return "".join(part for part in parts if part is not None)
        raise DataError(f"{what} must hold text; images and other parts are not read")
    raise DataError(f"{what}: its content must be text, got {type(content).__name__}")


def _require_plain(others: Mapping[str, Any], what: str) -> None:
    try:
        said = json.dumps(others, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{what}: {', '.join(others)} must hold text, finite numbers, lists or objects: {error}; mend the row"
        ) from error
    require_whole_text(said, f"{what}: {', '.join(others)}")
