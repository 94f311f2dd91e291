"""Messages whole, in whatever form rows hold them: with tool calls, reasoning, names, and the tools they call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from core.errors import DataError
from core.outside import cut

Turn = Mapping[str, Any]
"One message: role and content, and whatever else a template may read (tool_calls, reasoning_content, name)."
Tools = Sequence[Mapping[str, Any]]
"What the assistant may call, each a JSON schema as the template takes it."

ROLE_KEYS = ("role", "from")
_SHARE_GPT = {"human": "user", "gpt": "assistant"}
_TOOLS_ADVICE = "or set data.tools_field to null where the column is no list of tools"


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
    """What stands for them in a message, unchecked: ShareGPT writes `from` and `value`."""
    role = item.get("role", item.get("from"))
    if "role" not in item and isinstance(role, str):
        role = _SHARE_GPT.get(role, role)
    return role, item.get("content", item.get("value"))


def turn_of(item: Mapping[str, Any], what: str, *, padded: bool) -> dict[str, Any]:
    """A message with role and content, unchecked, and everything else that it holds; a call without content has "".

    Raises DataError, naming `what`, for tool calls that are none. `padded`: null stands for a key that is not there.
    """
    turn = {key: held for key, held in item.items() if held is not None}
    role, content = role_and_content(turn)
    others = {key: held for key, held in turn.items() if key not in ("role", "content", "from", "value")}
    calls = others.pop("tool_calls", None)
    if calls:
        others["tool_calls"] = _calls_of(calls, what, padded)
        content = "" if content is None else content
    return {"role": role, "content": content, **others}


def tools_of(value: Any, what: str, *, padded: bool) -> tuple[dict[str, Any], ...]:
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
            f"{what} must be a list of tools, each an object (a JSON schema), got {cut(repr(value))}; mend the row, "
            f"{_TOOLS_ADVICE}"
        )
    return tuple(_without_padding(one) if padded else one for one in tools)


def whole_text(turns: Sequence[Turn], tools: Tools = ()) -> str:
    """What turns and tools say beside role and content, as JSON; empty for nothing."""
    plain = {"role", "content"}
    more = [{key: held for key, held in turn.items() if key not in plain} for turn in turns]
    said = {"turns": more if any(more) else [], "tools": list(tools)}
    return json.dumps(said, sort_keys=True) if any(said.values()) else ""


def _calls_of(value: Any, what: str, padded: bool) -> list[dict[str, Any]]:
    listed = _json_of(value) if isinstance(value, str) else value
    if not _is_list(listed) or not all(isinstance(one, dict) for one in listed):
        raise DataError(
            f"{what}: its tool_calls must be a list of objects, got {cut(repr(value))}; mend the row"
        )
    return [_call(_without_padding(one) if padded else one) for one in listed]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """With arguments as the object that templates take; OpenAI's API has them as JSON text."""
    inner = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": _call(inner)}
    given = call.get("arguments")
    parsed = _json_of(given) if isinstance(given, str) else given
    return {**call, "arguments": parsed} if isinstance(parsed, dict) else dict(call)


def _without_padding(value: Any) -> Any:
    """Objects of columns have all keys that any of the column has, null where they are another's."""
    if isinstance(value, dict):
        return {key: _without_padding(held) for key, held in value.items() if held is not None}
    return [_without_padding(one) for one in value] if isinstance(value, list) else value


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
