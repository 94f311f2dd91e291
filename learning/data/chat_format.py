"""A tokenizer's chat format: the one place where conversations become text, by its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from core.errors import DataError
from core.outside import cut

Turn = Mapping[str, Any]
"One message: role and content, and whatever else a template may read (tool_calls, reasoning_content, name)."
Tools = Sequence[Mapping[str, Any]]
"What the assistant may call, each a JSON schema as the template takes it."


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    *,
    ask: bool,
    tools: Tools = (),
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """A conversation as the template writes it.

    Args:
        tokenizer: whose special tokens the template may name.
        turns: whole messages.
        ask: go on to where the assistant begins.
        tools: that the assistant may call; none: the template is told of no tools.
        template: Jinja text; None: the tokenizer's own.
        variables: further ones of the template.

    Returns:
        The text; special tokens are the template's own, so it is tokenised without more.

    Raises:
        Exception: templates are programs, and raise what they like.
    """
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
    (whole,), (spans,) = render(
        conversations=[[dict(turn) for turn in turns]],
        tools=[dict(tool) for tool in tools] or None,
        chat_template=own_template(tokenizer, tools=tools),
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


def named_template(tokenizer: PreTrainedTokenizerBase | None, given: str | None, *, key: str) -> str | None:
    """The Jinja text of the template that a tokenizer has under a name; None: it has none of that name.

    `key` is the setting. Raises DataError: no name is given and the tokenizer has several, none of them the default.
    """
    named = tokenizer.chat_template if tokenizer is not None else None
    if not isinstance(named, dict):
        return None
    if given is not None:
        return named.get(given)
    if named and "default" not in named:
        raise DataError(
            f"the tokenizer has {len(named)} chat templates and none is called default: expected the name of one in "
            f"{key}, got none; set it to one of {cut(', '.join(sorted(named)))}"
        )
    return None
