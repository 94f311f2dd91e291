"""A tokenizer's chat format: the one place where conversations become text, by its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from core.errors import DataError
from core.outside import cut
from learning.data.template_time import told_time
from learning.data.whole_turns import Tools, Turn

REASONING = ("reasoning_content", "reasoning", "thinking")
"What messages call what the assistant thought before its content."


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
        at: the time that it is told; None: the tokenizer's own (`learning.data.template_time`).

    Returns:
        The text; special tokens are the template's own, so it is tokenised without more.

    Raises:
        Exception: templates are programs, and raise what they like.
    """
    with told_time(tokenizer, template or own_template(tokenizer, tools=tools), at):
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


def render_marked(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], *, tools: Tools = ()
) -> tuple[str, list[tuple[int, int]]]:
    """A whole conversation, and the characters from and to which it is marked as generated; raises as above."""
    # apply_chat_template itself loses a turn whose mark stands before a blank
    render: Any = render_jinja_template
    template = own_template(tokenizer, tools=tools)
    with told_time(tokenizer, template):
        (whole,), (spans,) = render(
            conversations=[[dict(turn) for turn in turns]],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    return whole, [(int(first), int(end)) for first, end in spans]


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


def no_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Why there is no template of the tokenizer's own, to be said."""
    if isinstance(tokenizer.chat_template, dict) and tokenizer.chat_template:
        names = cut(", ".join(sorted(tokenizer.chat_template)))
        return f"none of the tokenizer's chat templates ({names}) is the default"
    return "the tokenizer has no chat template"


def require_written(
    render: Callable[[Sequence[Turn], Tools], str],
    turns: Sequence[Turn],
    tools: Tools,
    *,
    origin: str,
    key: str,
    learned: bool = False,
) -> None:
    """Raise DataError where a template leaves out tools, a call of them or, of what is learned, all reasoning.

    Args:
        render: writes turns and tools by the template.
        turns: whole.
        tools: that may be called.
        origin: names the row.
        key: the setting that names a template.
        learned: what the assistant says is learned, so its reasoning is to be written too.
    """
    asked: list[tuple[str, Sequence[Turn], Tools]] = []
    for index, turn in enumerate(turns):
        if turn.get("tool_calls"):
            fewer = [*turns[:index], _without(turn, "tool_calls"), *turns[index + 1 :]]
            asked.append((f"the tool_calls of message {index}", fewer, tools))
    if tools:
        asked.append(("the tools", turns, ()))
    if learned and any(turn.get(name) for turn in turns for name in REASONING):
        asked.append(("the assistant's reasoning", [_without(turn, *REASONING) for turn in turns], tools))
    if not asked:
        return
    length = len(render(turns, tools))
    for what, fewer, named in asked:
        try:
            shorter = render(fewer, named)
        except Exception:  # what is missed is read
            continue
        if len(shorter) >= length:
            raise DataError(
                f"{origin}: the chat template does not write {what}: expected a longer text than without, got one of "
                f"the same length; name a template that writes it by {key}, or take it out of the row"
            )


def _without(turn: Turn, *names: str) -> dict[str, Any]:
    return {name: held for name, held in turn.items() if name not in names}
