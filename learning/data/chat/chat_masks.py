"""Which tokens of a conversation the assistant wrote: by the template's own marks, else by rendering its beginnings."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from ....core.errors import DataError, ModelError
from ....core.outside import quote
from .chat_format import (
    OTHER_WORDS,
    no_template,
    own_template,
    render_chat,
    render_marked,
    require_written,
)
from .messages import Tools, Turn
from .template_variables import require_variables

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TAG_AT_END = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])\s*$")
_ASSISTANT = "assistant"
_LEARNED = ("weight", "train", "training", "trainable", "learn", "loss", "loss_mask")
"Keys of a message that say whether it is learned."


def conversation_tokens(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    *,
    origin: str,
    first_turn: int = 0,
    tools: Tools = (),
    ends: Sequence[int] = (),
    note: Callable[[str], object] | None = None,
    loss_on: Literal["assistant", "completion", "all"] = "assistant",
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, int64 [T], of a conversation, and which are learned, bool [T]: the assistant's of `first_turn` on.

    With `loss_on` completion all that the template writes from there on, headers and other roles too; all: everything.

    A turn's end token, the tokenizer's or one of `ends`, is learned, also where the next turn begins with it or, behind
    the last, nothing does; what a template writes behind it is not, nor are turns that say `weight: 0` or the like.
    `origin` is told in errors; `note` hears of keys that nothing reads.
    Raises ModelError: no template, or a tokenizer that does not say which characters a token is of. DataError: no turn
    of the assistant, a conversation that the template refuses, or a template that writes earlier turns differently
    when more follow.
    """
    require_template(tokenizer, tools)
    if loss_on != "assistant":
        return _whole(tokenizer, turns, origin, first_turn if loss_on == "completion" else 0, tools, note)
    said = [index for index, turn in enumerate(turns) if turn.get("role") == _ASSISTANT]
    if not any(index >= first_turn for index in said):
        raise DataError(f"{origin} has no message of role assistant, so there is nothing to learn from it")
    marked = [index for index, turn in enumerate(turns) if is_learned(turn, f"{origin}, message {index}")]
    learned = [index for index in said if index >= first_turn and index in marked]
    require_all_written(tokenizer, turns, tools, origin=origin, note=note)
    if _GENERATION.search(own_template(tokenizer, tools=tools) or ""):
        text, spans = _by_marks(tokenizer, turns, origin, said, learned, tools)
        if learned and note is not None:
            _note_beginning(tokenizer, turns[: learned[-1]], text, tools, note)
        closings: tuple[Any, ...] = ()
    else:
        text, spans = _by_beginnings(tokenizer, turns, origin, learned, tools)
        closings = (tokenizer.eos_token_id, *ends)
    ids, starts = _with_places(tokenizer, text)
    is_end = np.isin(ids, closings)
    last = spans[-1] if closings[1:] and spans and not turns[learned[-1]].get("tool_calls") else (0, 0)
    if last[1] == len(text) and not is_end[starts >= last[0]].any():
        # a template leaves the last turn open whose turns end where the next begin
        ids, starts, is_end = np.append(ids, ends[0]), np.append(starts, len(text)), np.append(is_end, True)
    mask = np.zeros(len(ids), dtype=bool)
    for first, end in spans:
        require_once(text[:first], text[first:end], origin)
        # of a template that asks with a blank at its end, a turn's first token has that blank too
        begin = starts[max(int(np.searchsorted(starts, first, side="right")) - 1, 0)]
        is_within = not np.any(starts == first) and text[begin:first].isspace()
        own = (starts >= (begin if is_within else first)) & (starts < end)
        closing = np.flatnonzero(own & is_end)
        own[closing[-1] + 1 if len(closing) else len(own) :] = False
        mask |= own if len(closing) else own | (is_end & (starts == end))
    _require_mask(mask, starts, text, turns, first_turn, origin)
    return ids, mask


def _whole(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    origin: str,
    first_turn: int,
    tools: Tools,
    note: Callable[[str], object] | None,
) -> tuple[np.ndarray, np.ndarray]:
    for index, turn in enumerate(turns[first_turn:], first_turn):
        if not is_learned(turn, f"{origin}, message {index}"):
            raise DataError(
                f"{origin}: message {index} says that it is not learned, and data.loss_on takes all; expected no such "
                "word; take it out, or set data.loss_on to assistant"
            )
    require_all_written(tokenizer, turns, tools, origin=origin, note=note)
    text = rendered(tokenizer, turns, ask=False, origin=origin, tools=tools)
    before = (
        rendered(tokenizer, turns[:first_turn], ask=True, origin=origin, tools=tools) if first_turn else ""
    )
    if not text.startswith(before):
        raise DataError(
            f"{origin}: the chat template writes the prompt otherwise when the completion follows, so where it begins "
            "cannot be told; set data.loss_on to assistant or all, or name another template (model.chat_template)"
        )
    ids, starts = _with_places(tokenizer, text)
    return ids, starts >= len(before)


def is_learned(turn: Turn, what: str) -> bool:
    """Whether a turn may be learned by what it says. Raises DataError: no yes and no no, or a yes of another role."""
    said = {name: turn[name] for name in _LEARNED if turn.get(name) is not None}
    for name, value in said.items():
        is_whole = isinstance(value, int | float) and value in (0, 1)
        if not is_whole or (value and turn["role"] != _ASSISTANT):
            raise DataError(
                f"{what}, of role {turn['role']}: expected '{name}' 0 or false where it is not learned, 1 or true "
                f"of the assistant's alone, got {quote(value)}; fix the row"
            )
    return all(said.values())


def require_once(before: str, learned: str, origin: str) -> None:
    """Raise DataError where what is learned begins with the mark, such as <think>, that a prompt ends with already."""
    tag = _TAG_AT_END.search(before)
    if tag is not None and learned.lstrip().startswith(tag[1]):
        raise DataError(
            f"{origin}: what is asked for an answer with ends with {tag[1]} and the answer begins with it again: "
            "expected it once, or the model learns to write it twice; take it out of the row, or name another template "
            "(model.chat_template)"
        )


def _note_beginning(
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Turn],
    text: str,
    tools: Tools,
    note: Callable[[str], object],
) -> None:
    """Note where a turn that is learned begins otherwise than an answer is asked for."""
    with suppress(DataError):  # of no turns, say
        prompt = rendered(tokenizer, asked, ask=True, origin="", tools=tools) if asked else ""
        if not text.startswith(prompt):
            note(
                f"the chat template asks for an answer with a text that ends {quote(prompt[-40:])}, and writes the "
                "conversation that is learned otherwise: what is learned is no continuation of it; see what it writes "
                "where add_generation_prompt is true (model.chat_template)"
            )


def _require_mask(
    mask: np.ndarray, starts: np.ndarray, text: str, turns: Sequence[Turn], first_turn: int, origin: str
) -> None:
    """Raise DataError where a turn whose words can be found is learned, or not, against what its row says."""
    contents = [str(turn.get("content")).strip() for turn in turns]
    for index, (turn, said) in enumerate(zip(turns, contents, strict=True)):
        if not said or sum(said in other for other in contents) > 1 or text.count(said) != 1:
            continue
        place = text.index(said)
        covered = mask[(starts >= place) & (starts < place + len(said))]
        wanted = turn["role"] == _ASSISTANT and index >= first_turn
        wanted = wanted and not any(turn.get(name) == 0 for name in _LEARNED)
        if not (covered.all() if wanted else not covered.any()):
            raise DataError(
                f"{origin}: message {index} is {'' if wanted else 'not '}to be learned, and the loss covers "
                f"{int(covered.sum())} of its {len(covered)} tokens; expected {'all' if wanted else 'none'}; look at "
                "the template's {% generation %} marks, or name another by model.chat_template"
            )


def require_template(tokenizer: PreTrainedTokenizerBase, tools: Tools = ()) -> None:
    """Raise ModelError when there is no chat template to write messages by."""
    if own_template(tokenizer, tools=tools) is None:
        raise ModelError(
            f"the rows hold messages but {no_template(tokenizer)}; name one with model.chat_template, or take "
            "a tokenizer that has one with model.tokenizer"
        )


def require_all_written(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    tools: Tools,
    *,
    origin: str,
    note: Callable[[str], object] | None = None,
) -> None:
    """Raise DataError where what is said, tools, a call or all reasoning is in no token of what is learned."""
    template, key = own_template(tokenizer, tools=tools), "model.chat_template"
    known = tokenizer.special_tokens_map
    require_variables(template or "", {}, known=known, note=note, advice=f"{key} names another template")

    render = partial(render_chat, tokenizer, ask=False, template=template)
    try:
        text = render(turns, tools=tools)
        require_written(
            render,
            turns,
            tools,
            text=text,
            template=template,
            origin=origin,
            key=key,
            learned=True,
            note=note,
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
        f"{origin}: the chat template refuses the conversation: {' '.join(str(error).split())[:200]}; fix the "
        "row's roles and their order"
    )


def _by_marks(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    origin: str,
    said: Sequence[int],
    learned: Sequence[int],
    tools: Tools,
) -> tuple[str, list[tuple[int, int]]]:
    """The text, and the first and last character of each turn of `learned`; `said` are all of the assistant's."""
    try:
        whole, spans = render_marked(tokenizer, turns, tools=tools)
    except Exception as error:  # templates are programs: they raise what they like
        raise _refused(origin, error) from error
    if list(said) == list(learned):
        return whole, spans
    if len(spans) != len(said):
        raise DataError(
            f"{origin}: the chat template marks {len(spans)} turn(s) as generated, not every one of the assistant's, "
            "so those that are not learned cannot be told; mark them all (model.chat_template)"
        )
    return whole, [span for index, span in zip(said, spans, strict=True) if index in learned]


def _by_beginnings(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    origin: str,
    learned: Sequence[int],
    tools: Tools,
) -> tuple[str, list[tuple[int, int]]]:
    whole = rendered(tokenizer, turns, ask=False, origin=origin, tools=tools)
    spans = []
    for index in learned:
        through = rendered(tokenizer, turns[: index + 1], ask=False, origin=origin, tools=tools)
        before = (
            rendered(tokenizer, turns[:index], ask=True, origin=origin, tools=tools)
            if index
            else _before_the_first(tokenizer, through, origin)
        )
        if index and through.startswith(before) and not whole.startswith(through):
            # Qwen3 writes empty thoughts before the last turn alone: of an earlier one they are no loss
            other = [*turns[:index], {"role": _ASSISTANT, "content": OTHER_WORDS}]
            opening, *_ = rendered(tokenizer, other, ask=False, origin=origin, tools=tools).split(OTHER_WORDS)
            through = before + through.removeprefix(opening) if opening.startswith(before) else through
        if not (whole.startswith(through) and through.startswith(before)):
            raise DataError(
                f"{origin}: the chat template writes message {index} otherwise when more messages follow, or begins it "
                "otherwise when it is to be generated, so its tokens cannot be told; say weight: 0 of it, or put "
                "{% generation %} marks into the template (model.chat_template)"
            )
        spans.append((len(before), len(through)))
    return whole, spans


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
