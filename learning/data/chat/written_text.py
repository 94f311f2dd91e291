"""What the model wrote, as functions, environments, files and tables get it; and what its turn was begun with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Int
from transformers import PreTrainedTokenizerBase

from ....core.records import Completion, FinishReason
from .messages import num_shared

_SAID = "what-the-assistant-said"
_OPENED = re.compile(r"<([A-Za-z][\w-]*)>\s*\Z")
"A tag that is open at the end of a text."

Render = Callable[..., str]
"Renders a conversation, with `ask=True` up to where the assistant begins."


def written_text(tokenizer: PreTrainedTokenizerBase, ids: Int[np.ndarray, " T"], *, stopped: bool) -> str:
    """The text of one turn, whose special tokens (`<think>`) stay; cut are padding and, behind it, the end token.

    `stopped`: its last token ended it. A closing tag such as `</answer>` ends a turn and is part of it all the same.
    """
    return _decoded(tokenizer, _without_end(tokenizer, ids.tolist(), stopped=stopped))


def response_text(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> str:
    """The same of a whole response; of an episode without the special tokens around what the environment said."""
    ids = completion.token_ids
    if completion.sampled is None:
        return written_text(tokenizer, ids, stopped=completion.finish_reason is FinishReason.STOP)
    special = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
    is_special = np.isin(ids, np.asarray([*special, *tokenizer.all_special_ids], dtype=np.int64))
    kept: list[int] = []
    for first, end, sampled in _runs(completion.is_sampled):
        part = ids[first:end]
        if sampled:
            stopped = end < len(ids) or completion.finish_reason is FinishReason.STOP
            kept += _without_end(tokenizer, part.tolist(), stopped=stopped)
        else:
            kept += part[~is_special[first:end]].tolist()
    return _decoded(tokenizer, kept)


def text_without_special_tokens(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> str:
    """What earlier versions took for the text of a response."""
    return _decoded(tokenizer, completion.token_ids.tolist(), skip_special_tokens=True)


def turn_beginning(render: Render, template: str) -> tuple[str, str]:
    """What a chat template begins the assistant's turn with behind its head, such as `<think>`, empty for nothing.

    Then the head of the turn where it is written of turns alone, and not where one is asked for. `template` is its
    text. A template that refuses a plain conversation has neither that could be told.
    """
    user, said = {"role": "user", "content": "-"}, {"role": "assistant", "content": _SAID}
    try:
        unopened, opened = render([user], ask=False), render([user], ask=True)
        # of an earlier turn: templates leave the reasoning out there, or write an empty one in the last
        answered = render([user, said] if opened == unopened else [user, said, user], ask=False)
    except Exception:  # templates are programs: they raise what they like
        return "", ""
    is_shown = answered.startswith(unopened) and _SAID in answered
    head = answered[len(unopened) : answered.index(_SAID)] if is_shown else ""
    if opened == unopened:
        return "", head if any(char.isalnum() for char in head) else ""
    if not opened.startswith(unopened):
        return "", ""
    opening = opened[len(unopened) :]
    shared = num_shared(opening, head)
    tag_at = opening.rfind("<", 0, shared)
    if ">" not in opening[tag_at:shared] and tag_at >= 0:
        shared = tag_at  # `<think>` and `</think>` begin alike
    behind = opening[shared:]
    if is_shown and behind.strip():
        return behind, ""
    tag = _OPENED.search(opening)
    return tag[0] if tag is not None and f"</{tag[1]}>" in template else "", ""


def text_prefill(prompt_template: str) -> str:
    """The same of data.prompt_template for plain text: a tag that stands open at its end."""
    opened = _OPENED.search(prompt_template.rpartition("{prompt}")[2])
    return opened[0] if opened is not None else ""


def _without_end(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, stopped: bool) -> list[int]:
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    end = len(ids)
    while end and ids[end - 1] in ends:
        end -= 1
    if stopped and end and end == len(ids) and _ends_turns(tokenizer, ids[-1]):
        end -= 1
    return ids[:end]


def _ends_turns(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Whether a token that stopped a response is of the format and not a word of it."""
    added = tokenizer.added_tokens_decoder.get(token)
    is_added = added is not None or token in tokenizer.all_special_ids
    text = str(tokenizer.convert_ids_to_tokens(token))
    # </s> closes what the whole text begins with, whatever the tokenizer's own end token is
    is_closing_tag = text.startswith("</") and f"<{text[2:]}" != tokenizer.bos_token
    return is_added and not is_closing_tag


def _runs(sampled: Bool[np.ndarray, " T"]) -> Iterator[tuple[int, int, bool]]:
    """(first, end, sampled) of each stretch of equal values."""
    places = [0, *(np.flatnonzero(np.diff(sampled)) + 1).tolist(), len(sampled)]
    for first, end in pairwise(places):
        if end > first:
            yield first, end, bool(sampled[first])


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, skip_special_tokens: bool = False) -> str:
    return "".join(
        tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )
