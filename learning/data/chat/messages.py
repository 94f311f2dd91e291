"""Conversations: lists of {role, content} as TRL, verl, LMSYS and ShareGPT write them, with all that messages hold.

Tool calls, reasoning, names, and the tools that may be called are kept. A prompt ends where the model is to answer:
assistant turns at the end are cut off.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Container, Mapping, Sequence
from itertools import takewhile
from typing import Any

from ....core.errors import DataError
from ....core.outside import cut, quote
from ....core.surfaces.surface import surface

Turn = Mapping[str, Any]
"One message: role and content, and whatever else a template may read (tool_calls, reasoning_content, name)."
Tools = Sequence[Mapping[str, Any]]
"What the assistant may call, each a JSON schema as the template takes it."
Messages = tuple[tuple[str, str], ...]
"Role and content alone."

ROLE_KEYS = ("role", "from")
_TOOLS_ADVICE = "or set data.tools_field to null where the column is no list of tools"
ROLES = ("system", "developer", "user", "assistant", "tool")
_SURROGATE = re.compile("[\ud800-\udfff]")


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
            f"{what} must be text, got half of a surrogate pair at character {half.start() + 1}; fix the escape"
        )
    return text


def asked_and_answered(turns: Sequence[Turn], what: str) -> tuple[tuple[Turn, ...], str]:
    """The turns up to the last one that is to be answered, and the answer that followed, empty for none.

    Raises DataError, naming `what`: there is nothing to answer.
    """
    asked, answer = list(turns), ""
    while asked and asked[-1]["role"] == "assistant":
        answer = asked.pop()["content"]
    if not asked or asked[-1]["role"] not in ("user", "tool"):
        last = f"a {asked[-1]['role']} turn" if asked else "no turn"
        raise DataError(
            f"{what} has nothing to answer: expected a last turn of a user (or a tool), got {last} "
            "before the assistant's; fix the row, or leave it out by data.filter"
        )
    if asked[-1]["role"] == "user" and is_blank(asked[-1]["content"]):
        raise DataError(
            f"{what}: the last turn is empty; expected text to answer, or leave it out by data.filter"
        )
    return tuple(asked), answer


def parse_turns(value: Any, what: str, *, roles: Sequence[str] | None = ROLES) -> list[Turn]:
    """A conversation's messages, in whatever form `turn_list` reads.

    `what` names row and field in errors; `roles` are those that are known, None: any, in a list that is not empty, with
    further keys of any type. Raises DataError: no list of {role, content}, an unknown role, a content that is no text.
    """
    value = turn_list(value)
    if not isinstance(value, list | tuple):
        raise DataError(f"{what} must be a list of {{role, content}}, got {type(value).__name__}")
    if roles is None and not value:
        raise DataError(f"{what} must be a list of {{role, content}}, got an empty one; fix the row")
    return [_turn(item, f"{what}, message {number}", roles) for number, item in enumerate(value)]


def pairs_of(turns: Sequence[Turn]) -> Messages:
    """Role and content of each."""
    return tuple((turn["role"], turn["content"]) for turn in turns)


def readable(messages: Messages) -> str:
    """Return the turns as text: the user's words alone where nobody else but a system prompt speaks."""
    spoken = [turn for turn in messages if turn[0] not in ("system", "developer")]
    if len(spoken) == 1:
        return spoken[0][1]
    return "\n\n".join(f"{role}: {content}" for role, content in messages)


def num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items, or characters, both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def as_dicts(messages: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """The form that chat templates take."""
    return [{"role": role, "content": content} for role, content in messages]


def turn_list(value: Any) -> Any:
    """A conversation as a list of its messages, where it is a dict of lists or JSON text; what is none as it is.

    A dict of lists is what `datasets` makes of a Sequence of objects.
    """
    if isinstance(value, str):
        parsed = _json_of(value)
        listed = turn_list(parsed) if isinstance(parsed, list | dict) else None
        is_talk = isinstance(listed, list) and bool(listed) and all(_has_role(turn) for turn in listed)
        return listed if is_talk else value
    if isinstance(value, dict) and any(isinstance(value.get(key), list) for key in ROLE_KEYS):
        columns = {key: held for key, held in value.items() if held is not None}
        lengths = {len(held) if isinstance(held, list) else -1 for held in columns.values()}
        if len(lengths) == 1:
            return [dict(zip(columns, turn, strict=True)) for turn in zip(*columns.values(), strict=True)]
    return value


def role_and_content(item: Mapping[str, Any]) -> tuple[Any, Any]:
    """What stands for them in a message, unchecked: ShareGPT writes `from` and `value`, and has roles of its own."""
    role = item.get("role", item.get("from"))
    read_as = surface("role").used.get(role, role) if isinstance(role, str) else role
    return "assistant" if read_as == "call" else read_as, item.get("content", item.get("value"))


def require_role(role: Any, what: str, also: Container[str] = ()) -> None:
    """Raise DataError for a role that is none of those that are known, nor of `also`."""
    table = surface("role")
    if not isinstance(role, str) or (role not in table.used and role not in also):
        got = f"'{cut(role)}'" if isinstance(role, str) else type(role).__name__
        known = ", ".join(table.used)
        raise DataError(f"{what} has an unknown role: expected one of {known}, got {got}; {table.advice}")


def tools_of(value: Any, what: str) -> tuple[dict[str, Any], ...]:
    """The tools that a row names: a list of objects, or JSON text of one. Raises DataError for anything else."""
    if isinstance(value, str):
        parsed = _json_of(value)
        value = None if value.strip() in ("", "null") else value if parsed is None else parsed
    if value is None:
        return ()
    given = value if _is_list(value) else [value]
    parsed = [_json_of(one) if isinstance(one, str) else one for one in given]
    tools = [one for one in parsed if isinstance(one, dict)]
    if not _is_list(value) or len(tools) < len(parsed):
        raise DataError(
            f"{what} must be a list of tools, each an object (a JSON schema), got {cut(repr(value))}; fix the row, "
            f"{_TOOLS_ADVICE}"
        )
    for one in tools:
        _require_known(one, what, "tool")
    return tuple(tools)


def whole_text(turns: Sequence[Turn], tools: Tools = ()) -> str:
    """What turns and tools say beside role and content, as JSON; empty for nothing."""
    plain = {"role", "content"}
    more = [{key: held for key, held in turn.items() if key not in plain} for turn in turns]
    said = {"turns": more if any(more) else [], "tools": list(tools)}
    return json.dumps(said, sort_keys=True) if any(said.values()) else ""


def _turn(item: Any, what: str, roles: Sequence[str] | None) -> Turn:
    """A message with role and content, and everything else that it holds; a call without content has ""."""
    if not isinstance(item, dict):
        raise DataError(f"{what} must be an object with role and content, got {type(item).__name__}")
    # of columns, null stands for a key that is not there
    others = {key: held for key, held in item.items() if held is not None}
    role, content = role_and_content(others)
    given = [others.pop(key, None) for key in ("role", "from", "content", "value")]
    for one, other in (given[:2], given[2:]):
        if one is not None and other is not None and one != other:
            raise DataError(f"{what} says both {quote(one)} and {quote(other)}; take one out")
    calls, call = others.pop("tool_calls", None), others.pop("function_call", None)
    if "call" in (surface("role").used.get(one) for one in given[:2] if isinstance(one, str)):
        call, content = content, ""
    if call is not None and not calls:
        listed = _json_of(call) if isinstance(call, str) else call
        listed = listed if _is_list(listed) else [listed]
        calls = [
            one if "function" in (one or ()) else {"type": "function", "function": one} for one in listed
        ]
    if calls:
        others["tool_calls"] = _calls_of(calls, what)
        content = "" if content is None else content
    if roles is not None or not isinstance(role, str):
        require_role(role, what, roles or ())
    content = require_whole_text(_text(content, what), f"{what}: its content")
    if others:
        _require_plain(others, what, any_type=roles is None)
    return {"role": role, "content": content, **others}


def _text(content: Any, what: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):  # OpenAI's parts
        for part in content:
            surface("message.part").require(
                part if isinstance(part, dict) else {}, f"{what}: a part", error=DataError
            )
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if content and all(isinstance(part, str) for part in parts):
            return "".join(part for part in parts if part is not None)
        raise DataError(f"{what} must hold text; images and other parts are not read")
    raise DataError(f"{what}: its content must be text, got {type(content).__name__}")


def _require_plain(others: Mapping[str, Any], what: str, *, any_type: bool) -> None:
    try:
        said = json.dumps(others, allow_nan=any_type, ensure_ascii=False, default=repr if any_type else None)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{what}: {', '.join(others)} must hold text, finite numbers, lists or objects: {error}; fix the row"
        ) from error
    require_whole_text(said, f"{what}: {', '.join(others)}")


def _calls_of(value: Any, what: str) -> list[dict[str, Any]]:
    listed = _json_of(value) if isinstance(value, str) else value
    if not _is_list(listed) or not all(isinstance(one, dict) for one in listed):
        raise DataError(
            f"{what}: its tool_calls must be a list of objects, got {cut(repr(value))}; fix the row"
        )
    for one in listed:
        _require_known(one, what, "message.call")
    return [_call(one, f"{what}, tool_calls[{number}]") for number, one in enumerate(listed)]


def _require_known(one: Mapping[str, Any], what: str, kind: str) -> None:
    """Raise DataError for a tool or call without a name, or with a key that cannot be passed over; others are noted."""
    inner, said = one.get("function", one), kind.removeprefix("message.")
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise DataError(
            f"{what}: a {said} must be an object that names a function, got {quote(one)}; fix the row"
        )
    for name, given in ((kind, one), (f"{kind}.function", inner))[: 1 + (inner is not one)]:
        surface(name).require(given, f"a {said}", error=lambda text: DataError(f"{what}: {text}"))


def _call(call: Mapping[str, Any], what: str) -> dict[str, Any]:
    """With arguments as the object that templates take; OpenAI's API has them as JSON text, empty for none."""
    inner = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": _call(inner, f"{what}.function")}
    given = call.get("arguments")
    parsed = _json_of(given.strip() or "{}") if isinstance(given, str) else given
    if not isinstance(parsed, dict | None) or (parsed is None and given is not None):
        raise DataError(
            f"{what}.arguments: expected an object, or JSON text of one, got {quote(given)}; fix the row"
        )
    return {**call, "arguments": parsed} if parsed is not None else dict(call)


def _json_of(text: str) -> Any:
    """The list or object that a text is as JSON; None for any other text."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _has_role(turn: Any) -> bool:
    return isinstance(turn, dict) and any(isinstance(turn.get(key), str) for key in ROLE_KEYS)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
