"""Which tokens of a conversation the assistant wrote: by the template's own marks, else by rendering its beginnings."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhfspec.core.errors import DataError, ModelError
from rlhfspec.learning.data.chat_format import (
    no_template,
    own_template,
    render_chat,
    render_marked,
    require_written,
)
from rlhfspec.learning.data.messages import Tools, Turn

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ASSISTANT = "assistant"


def conversation_tokens(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    *,
    origin: str,
    first_turn: int = 0,
    tools: Tools = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, int64 [T], of a whole conversation, and which the assistant wrote from `first_turn` on, bool [T].

    A turn's end token is the assistant's; what a template writes behind it is not. `origin` is told in errors.
    Raises ModelError: no template, or a tokenizer that does not say which characters a token is of. DataError: no turn
    of the assistant, a conversation that the template refuses, or a template that writes earlier turns differently
    when more follow.
    """
    require_template(tokenizer, tools)
    if not any(turn.get("role") == _ASSISTANT for turn in turns[first_turn:]):
        raise DataError(f"{origin} has no message of role assistant, so there is nothing to learn from it")
    require_all_written(tokenizer, turns, tools, origin=origin)
    if _GENERATION.search(own_template(tokenizer, tools=tools) or ""):
        return _by_marks(tokenizer, turns, origin, first_turn, tools)
    return _by_beginnings(tokenizer, turns, origin, first_turn, tools)


def require_template(tokenizer: PreTrainedTokenizerBase, tools: Tools = ()) -> None:
    """Raise ModelError when there is no chat template to write messages by."""
    if own_template(tokenizer, tools=tools) is None:
        raise ModelError(
            f"the rows hold messages but {no_template(tokenizer)}; name one with model.chat_template, or take "
            "a tokenizer that has one with model.tokenizer"
        )


def require_all_written(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], tools: Tools, *, origin: str
) -> None:
    """Raise DataError where what is said, tools, a call or all reasoning is in no token of what is learned."""

    def render(turns: Sequence[Turn], named: Tools) -> str:
        template = own_template(tokenizer, tools=tools)
        return render_chat(tokenizer, turns, ask=False, tools=named, template=template)

    try:
        text = render(turns, tools)
        require_written(
            render, turns, tools, text=text, origin=origin, key="model.chat_template", learned=True
        )
    except DataError:
        raise
    except Exception as error:  # templates are programs: they raise what they like
        raise _refused(origin, error) from error


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    *,
    ask: bool,
    origin: str,
    tools: Tools = (),
) -> str:
    """A conversation as the template writes it; with `ask` up to where the assistant begins. Raises DataError."""
    try:
        return render_chat(tokenizer, turns, ask=ask, tools=tools)
    except Exception as error:  # templates are programs: they raise what they like
        raise _refused(origin, error) from error


def _refused(origin: str, error: Exception) -> DataError:
    return DataError(
        f"{origin}: the chat template refuses the conversation: {' '.join(str(error).split())[:200]}; mend the "
        "row's roles and their order"
    )


def _by_marks(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    origin: str,
    first_turn: int,
    tools: Tools,
) -> tuple[np.ndarray, np.ndarray]:
    try:
        whole, spans = render_marked(tokenizer, turns, tools=tools)
    except Exception as error:  # templates are programs: they raise what they like
        raise _refused(origin, error) from error
    num_earlier = sum(turn.get("role") == _ASSISTANT for turn in turns[:first_turn])
    if num_earlier and len(spans) != sum(turn.get("role") == _ASSISTANT for turn in turns):
        raise DataError(
            f"{origin}: the chat template marks {len(spans)} turn(s) as generated, not every one of the assistant's, "
            "so those of the prompt cannot be told; mark them all (model.chat_template)"
        )
    ids, starts = _with_places(tokenizer, whole)
    mask = np.zeros(len(ids), dtype=bool)
    for first, end in spans[num_earlier:]:
        mask |= (starts >= first) & (starts < end)
    return ids, mask


def _by_beginnings(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    origin: str,
    first_turn: int,
    tools: Tools,
) -> tuple[np.ndarray, np.ndarray]:
    whole = rendered(tokenizer, turns, ask=False, origin=origin, tools=tools)
    ids, starts = _with_places(tokenizer, whole)
    mask = np.zeros(len(ids), dtype=bool)
    for index, turn in enumerate(turns):
        if turn.get("role") != _ASSISTANT or index < first_turn:
            continue
        through = rendered(tokenizer, turns[: index + 1], ask=False, origin=origin, tools=tools)
        before = (
            rendered(tokenizer, turns[:index], ask=True, origin=origin, tools=tools)
            if index
            else _before_the_first(tokenizer, through, origin)
        )
        if not (whole.startswith(through) and through.startswith(before)):
            raise DataError(
                f"{origin}: the chat template writes message {index} otherwise when more messages follow, or begins it "
                "otherwise when it is to be generated, so its tokens cannot be told; put {% generation %} marks into "
                "the template (model.chat_template)"
            )
        own = np.flatnonzero((starts >= len(before)) & (starts < len(through)))
        ends = own[ids[own] == tokenizer.eos_token_id]
        mask[own if not len(ends) else own[own <= ends[-1]]] = True
    return ids, mask


def _before_the_first(tokenizer: PreTrainedTokenizerBase, through: str, origin: str) -> str:
    """What a template writes before the words of an assistant that begins: up to what it asks for an answer with."""
    user = [{"role": "user", "content": "-"}]
    asked, unopened = (rendered(tokenizer, user, ask=ask, origin=origin) for ask in (True, False))
    opening = asked.removeprefix(unopened)
    if not opening or not asked.startswith(unopened) or opening not in through:
        raise DataError(
            f"{origin} begins with a message of the assistant, and where its words begin cannot be told from the chat "
            "template; expected a message of a system or user first, or {% generation %} marks in the template "
            "(model.chat_template); take the message out"
        )
    return through[: through.index(opening) + len(opening)]


def _with_places(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of a rendered text, and the character that each begins at."""
    if not tokenizer.is_fast:
        raise ModelError(
            "the tokenizer does not say which characters a token is of, so the assistant's cannot be found; expected a "
            "fast tokenizer (tokenizer.json)"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = [start for start, _ in encoded["offset_mapping"]]
    return np.asarray(encoded["input_ids"], dtype=np.int64), np.asarray(starts, dtype=np.int64)
