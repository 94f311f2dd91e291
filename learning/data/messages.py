"""Conversations: lists of {role, content} as TRL, verl, LMSYS and ShareGPT write them.

A prompt ends where the model is to answer: assistant turns at the end are cut off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from core.errors import DataError
from core.outside import cut

Messages = tuple[tuple[str, str], ...]

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHARE_GPT = {"human": "user", "gpt": "assistant"}
_SURROGATE = re.compile("[\ud800-\udfff]")


def looks_like_messages(value: Any) -> bool:
    """True for a list whose first item is a mapping."""
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], dict)


def require_whole_text(text: str, what: str) -> str:
    """Return `text`. Raises DataError for half of a surrogate pair, which no tokenizer takes."""
    if half := _SURROGATE.search(text):
        raise DataError(
            f"{what} must be text, got half of a surrogate pair at character {half.start() + 1}; mend the escape"
        )
    return text


def parse_messages(value: Any, what: str) -> tuple[Messages, str]:
    """Return the turns up to the last one that is to be answered, and the answer that followed ("" for none).

    Args:
        value: what stands in the row.
        what: names row and field in messages of errors.

    Raises:
        DataError: no list of {role, content}, a role that is not known, a content that is no text, nothing to answer.
    """
    if not isinstance(value, list | tuple):
        raise DataError(f"{what} must be a list of {{role, content}}, got {type(value).__name__}")
    turns = [_turn(item, f"{what}, message {number}") for number, item in enumerate(value)]
    answer = ""
    while turns and turns[-1][0] == "assistant":
        answer = turns.pop()[1]
    if not turns or turns[-1][0] not in ("user", "tool"):
        last = f"a {turns[-1][0]} turn" if turns else "no turn"
        raise DataError(
            f"{what} has nothing to answer: expected a last turn of a user (or a tool), got {last} "
            "before the assistant's; mend the row, or leave it out by data.filter"
        )
    if not turns[-1][1].strip():
        raise DataError(
            f"{what}: the last turn is empty; expected text to answer, or leave it out by data.filter"
        )
    return tuple(turns), answer


def readable(messages: Messages) -> str:
    """Return the turns as text: the user's words alone where nobody else but a system prompt speaks."""
    spoken = [turn for turn in messages if turn[0] not in ("system", "developer")]
    if len(spoken) == 1:
        return spoken[0][1]
    return "\n\n".join(f"{role}: {content}" for role, content in messages)


def as_dicts(messages: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """The form that chat templates take."""
    return [{"role": role, "content": content} for role, content in messages]


def role_and_content(item: Mapping[str, Any]) -> tuple[Any, Any]:
    """What stands for them in a message, unchecked: ShareGPT writes `from` and `value`."""
    role = item.get("role", item.get("from"))
    if "role" not in item and isinstance(role, str):
        role = _SHARE_GPT.get(role, role)
    return role, item.get("content", item.get("value"))


def _turn(item: Any, what: str) -> tuple[str, str]:
    if not isinstance(item, dict):
        raise DataError(f"{what} must be an object with role and content, got {type(item).__name__}")
    role, content = role_and_content(item)
    if role not in ROLES:
        got = f"'{cut(role)}'" if isinstance(role, str) else type(role).__name__
        raise DataError(f"{what} has an unknown role: expected one of {', '.join(ROLES)}, got {got}")
    return role, require_whole_text(_text(content, item, what), f"{what}: its content")


def _text(content: Any, item: dict[str, Any], what: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):  # OpenAI's parts
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if content and all(isinstance(part, str) for part in parts):
            return "".join(part for part in parts if part is not None)
        raise DataError(f"{what} must hold text; images and other parts are not read")
    if content is None and item.get("tool_calls"):
        raise DataError(f"{what} calls tools without a text; write the call into its content")
    raise DataError(f"{what}: its content must be text, got {type(content).__name__}")
