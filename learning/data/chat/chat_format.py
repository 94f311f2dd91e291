"""A tokenizer's chat format: the one place where conversations become text, by its chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ....core.errors import DataError
from ....core.outside import cut, quote
from ....core.surfaces.surface import surface
from .messages import Tools, Turn, require_role
from .template_time import template_time_of
from .template_variables import words_of

REASONING = ("reasoning_content", "reasoning", "thinking")
"What messages call what the assistant thought before its content."
OTHER_WORDS = "what-stands-for-another-text"


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    *,
    ask: bool,
    tools: Tools = (),
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    at: datetime | None = None,
) -> str:
    """A conversation as the template writes it.

    Args:
        tokenizer: whose special tokens the template may name.
        turns: whole messages.
        ask: go on to where the assistant begins.
        tools: that the assistant may call; none: the template is told of no tools.
        template: Jinja text; None: the tokenizer's own.
        variables: further ones of the template.
        at: the time that it is told; None: the tokenizer's own (`learning.data.chat.template_time`).

    Returns:
        The text; special tokens are the template's own, so it is tokenised without more.

    Raises:
        Exception: templates are programs, and raise what they like.
    """

    def write(turns: Sequence[Turn]) -> str:
        return str(
            tokenizer.apply_chat_template(
                [dict(turn) for turn in turns],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=template,
                add_generation_prompt=ask,
                tokenize=False,
                **(variables or {}),
            )
        )

    with template_time_of(tokenizer, template or own_template(tokenizer, tools=tools), at):
        return write(_as_template_reads(write, turns))


def render_marked(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], *, tools: Tools = ()
) -> tuple[str, list[tuple[int, int]]]:
    """A whole conversation, and the characters from and to which it is marked as generated; raises as above."""
    # apply_chat_template itself loses a turn whose mark stands before a blank
    render: Any = render_jinja_template
    template = own_template(tokenizer, tools=tools)

    def write(turns: Sequence[Turn]) -> tuple[str, list[tuple[int, int]]]:
        (whole,), (spans,) = render(
            conversations=[[dict(turn) for turn in turns]],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
        return whole, [(int(first), int(end)) for first, end in spans]

    with template_time_of(tokenizer, template):
        return write(_as_template_reads(lambda turns: write(turns)[0], turns))


def _as_template_reads(write: Callable[[Sequence[Turn]], str], turns: Sequence[Turn]) -> Sequence[Turn]:
    """The turns with arguments of calls in the form that a template takes: an object, or JSON text as OpenAI's API has.

    `write` renders turns. A template that joins text to them raises for an object, or writes it as Python would.
    """
    objects = [_call_arguments(call) for turn in turns for call in turn.get("tool_calls") or ()]
    objects = [one for one in objects if isinstance(one, dict) and one]
    if not objects:
        return turns
    texts = [_with_text_arguments(turn) for turn in turns]
    try:
        text = write(turns)
    except Exception:  # templates are programs: they raise what they like
        try:
            write(texts)
        except Exception:
            return turns  # whoever renders them hears why
        return texts
    if all(str(one) not in text for one in objects):
        return turns
    with_texts = write(texts)
    return texts if any(text.count(str(one)) > with_texts.count(str(one)) for one in objects) else turns


def own_template(tokenizer: PreTrainedTokenizerBase, *, tools: Tools = ()) -> str | None:
    """The Jinja text of the tokenizer's own template, of several the one for tools where there are some; None: none."""
    named = tokenizer.chat_template
    if not isinstance(named, dict):
        return named
    return (named.get("tool_use") if tools else None) or named.get("default")


def named_template(tokenizer: PreTrainedTokenizerBase | None, name: str) -> str | None:
    """The Jinja text of one of a tokenizer's several templates; None where it has none of that name."""
    named = tokenizer.chat_template if tokenizer is not None else None
    return named.get(name) if isinstance(named, dict) else None


def plain_note(tokenizer: PreTrainedTokenizerBase, token_ids: Iterable[int]) -> str | None:
    """That a plain prompt goes without the chat template that there is; None: there is none, or its marks are there."""
    marks = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    if own_template(tokenizer) is None or marks.difference([tokenizer.bos_token_id]) & {*token_ids}:
        return None
    return (
        "plain prompts go without the chat template that the tokenizer has: to ask a chat model, give messages "
        '([{"role": "user", "content": ...}]), or set data.chat: true'
    )


def no_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Why there is no template of the tokenizer's own, to be said."""
    if isinstance(tokenizer.chat_template, dict) and tokenizer.chat_template:
        names = cut(", ".join(sorted(tokenizer.chat_template)))
        return f"none of the tokenizer's chat templates ({names}) is the default"
    return "the tokenizer has no chat template"


def _require_content(
    render: Callable[[Sequence[Turn]], str], turns: Sequence[Turn], text: str, *, origin: str, key: str
) -> None:
    """Raise DataError where a template leaves out what somebody says; arguments as below."""
    for index, turn in enumerate(turns):
        content = turn.get("content")
        if not isinstance(content, str):
            continue
        said = content.strip()
        # what stands in others' turns too is to be written as often
        if text.count(said) >= (sum(said in str(one.get("content")) for one in turns) if said else 0):
            continue
        try:
            is_read = render([*turns[:index], {**turn, "content": OTHER_WORDS}, *turns[index + 1 :]]) != text
        except Exception:  # what is missed is read
            continue
        if not is_read:
            raise DataError(
                f"{origin}: the chat template does not write what the {turn['role']} says (message {index}): expected "
                "its content in the text, got the same text whatever it is (a template may take lists of parts alone, "
                f"or know no such role); name another by {key}, or take the turn out"
            )


def require_written(
    render: Callable[..., str],
    turns: Sequence[Turn],
    tools: Tools,
    *,
    text: str,
    template: str | None = None,
    origin: str,
    key: str,
    learned: bool = False,
    note: Callable[[str], object] | None = None,
) -> None:
    """Raise DataError where a template leaves out what is said, tools, a call or, of what is learned, all reasoning.

    Args:
        render: writes turns, and `tools`, by the template.
        turns: whole.
        tools: that may be called.
        text: what the template makes of them.
        template: its Jinja text, which says what it reads of a message; None: that has been looked at.
        origin: names the row.
        key: the setting that names a template.
        learned: what the assistant says is learned, so its reasoning is to be written too.
        note: is told of what nothing reads; None: `note_once`.
    """
    words = words_of(template or "")
    for index, turn in enumerate(turns if template is not None else ()):
        require_role(turn["role"], f"{origin}: message {index}", words)
        unread = {name: held for name, held in turn.items() if name not in words}
        surface("message").require(
            unread, "a message", error=lambda text: DataError(f"{origin}: {text}"), note=note
        )
    _require_content(partial(render, tools=tools), turns, text, origin=origin, key=key)
    asked: list[tuple[str, Sequence[Turn], Tools]] = []
    for index, turn in enumerate(turns):
        if turn.get("tool_calls"):
            fewer = [*turns[:index], _without(turn, "tool_calls"), *turns[index + 1 :]]
            asked.append((f"the tool_calls of message {index}", fewer, tools))
    if tools:
        asked.append(("the tools", turns, ()))
    if learned and any(turn.get(name) for turn in turns for name in REASONING):
        asked.append(("the assistant's reasoning", [_without(turn, *REASONING) for turn in turns], tools))
    for what, fewer, named in asked:
        try:
            shorter = render(fewer, tools=named)
        except Exception:  # what is missed is read
            continue
        if len(shorter) >= len(text):
            raise DataError(
                f"{origin}: the chat template does not write {what}: expected a longer text than without, got one of "
                f"the same length; name a template that writes it by {key}, or take it out of the row"
            )
    for one in (*tools, *(call for turn in turns for call in turn.get("tool_calls") or ())):
        if one.get("function", one)["name"] not in text:
            raise DataError(
                f"{origin}: the chat template does not write the name of {quote(one)}; expected it in the text; write "
                'the row\'s as {"type": "function", "function": {"name": ...}}, or name a template that reads its form '
                f"by {key}"
            )


def _call_arguments(call: Mapping[str, Any]) -> Any:
    """What a tool is called with; OpenAI has it within `function`."""
    inner = call.get("function")
    return (inner if isinstance(inner, dict) else call).get("arguments")


def _with_text_arguments(turn: Turn) -> Turn:
    calls = turn.get("tool_calls")
    return {**turn, "tool_calls": [_text_call(call) for call in calls]} if calls else turn


def _text_call(call: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _text_call(call["function"])}
    given = call.get("arguments")
    return (
        {**call, "arguments": json.dumps(given, ensure_ascii=False)} if isinstance(given, dict) else {**call}
    )


def _without(turn: Turn, *names: str) -> dict[str, Any]:
    return {name: held for name, held in turn.items() if name not in names}
