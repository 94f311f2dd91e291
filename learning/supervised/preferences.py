"""Pairs for a reward model: one prompt, a chosen and a rejected response, as the token ids that PPO will score.

Formats are those of TRL: `prompt`, `chosen`, `rejected` as text or as lists of messages; without `prompt` the two
begin with it alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhfspec.core.errors import DataError
from rlhfspec.core.settings.supervised import PreferencesConfig
from rlhfspec.learning.data.messages import Tools, Turn
from rlhfspec.learning.data.record import Record
from rlhfspec.learning.rewards.rendering import render
from rlhfspec.learning.supervised.chat_masks import rendered, require_all_written, require_template


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """Two sequences, of which the first is to score higher."""

    chosen_ids: np.ndarray
    "[T] int64"
    rejected_ids: np.ndarray
    "[U] int64"
    margin: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Of both: what the pair takes of a forward."""
        return len(self.chosen_ids) + len(self.rejected_ids)

    @property
    def identity(self) -> bytes:
        """Equal for equal pairs alone."""
        lengths = b"%d %d %r " % (len(self.chosen_ids), len(self.rejected_ids), self.margin)
        return lengths + self.chosen_ids.tobytes() + self.rejected_ids.tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Texts:
    prompt: str
    turns: tuple[Turn, ...]
    chosen: str | Turn
    "of messages the turn whole"
    rejected: str | Turn
    tools: Tools = ()


def encode_preferences(
    rows: Sequence[Record], data: PreferencesConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[PreferencePair], int]:
    """Every row as a pair, and how many were left out as too long.

    Raises DataError naming the row: a missing field, a malformed message, two equal responses (as text or as tokens), a
    margin that is no number, a sequence that is too long with on_long fail, or a response that alone is too long.
    """
    pairs: list[PreferencePair] = []
    for row in rows:
        texts = _texts(row, data, tokenizer)
        if texts.chosen == texts.rejected:
            raise DataError(
                f"{row.origin}: chosen and rejected are the same response; expected two, take it out"
            )
        limit = data.token_limit if data.on_long == "truncate" else None
        both = [
            render(tokenizer, texts.prompt, texts.turns, response, max_tokens=limit, tools=texts.tools)
            for response in (texts.chosen, texts.rejected)
        ]
        longest = max(len(ids) for ids in both)
        if longest > data.token_limit:
            if data.on_long == "skip":
                continue
            raise DataError(
                f"{row.origin} has {'a response' if limit else 'a sequence'} of {longest} tokens, data.max_tokens is "
                f"{data.token_limit}; raise it, or set data.on_long to skip"
            )
        chosen, rejected = (np.asarray(ids, dtype=np.int64) for ids in both)
        margin = _margin(row, data)
        if np.array_equal(chosen, rejected):
            raise DataError(
                f"{row.origin}: chosen and rejected differ as text and are the same {len(chosen)} tokens, of which "
                "nothing can be learned; expected two responses, take it out"
            )
        pairs.append(PreferencePair(chosen_ids=chosen, rejected_ids=rejected, margin=margin))
    if not pairs:
        raise DataError(
            f"no pair left of {len(rows)} rows: all are longer than data.max_tokens {data.token_limit}; raise it"
        )
    return pairs, len(rows) - len(pairs)


def _margin(row: Record, data: PreferencesConfig) -> float:
    name = data.margin_field or "margin"
    if data.margin_field is None and row.values.get(name) is None:
        return 0.0
    value = row.find(name, "data.margin_field")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{row.origin}: field '{name}' must be a finite number, got {value!r}")
    return float(value)


def _texts(row: Record, data: PreferencesConfig, tokenizer: PreTrainedTokenizerBase) -> _Texts:
    if row.holds_list(data.chosen_field) or row.holds_list(data.rejected_field):
        require_template(tokenizer, row.tools(data.tools_field))
        return _of_messages(row, data, tokenizer)
    chosen = row.text(data.chosen_field, "data.chosen_field")
    rejected = row.text(data.rejected_field, "data.rejected_field")
    if row.values.get(data.prompt_field) is None:
        prompt = _shared_text(chosen, rejected)
        return _Texts(prompt=prompt, turns=(), chosen=chosen[len(prompt) :], rejected=rejected[len(prompt) :])
    text = data.prompt_template.replace("{prompt}", row.text(data.prompt_field, "data.prompt_field"))
    if not data.chat:
        return _Texts(prompt=text, turns=(), chosen=chosen, rejected=rejected)
    tools = row.tools(data.tools_field)
    require_template(tokenizer, tools)
    turns = ({"role": "user", "content": text},)
    if tools:
        answered = (*turns, {"role": "assistant", "content": chosen})
        require_all_written(tokenizer, answered, tools, origin=row.origin)
    return _Texts(prompt=text, turns=turns, chosen=chosen, rejected=rejected, tools=tools)


def _of_messages(row: Record, data: PreferencesConfig, tokenizer: PreTrainedTokenizerBase) -> _Texts:
    ends = [
        row.turns(data.chosen_field, "data.chosen_field", roles=None),
        row.turns(data.rejected_field, "data.rejected_field", roles=None),
    ]
    given = row.values.get(data.prompt_field)
    if isinstance(given, str) and not row.holds_list(data.prompt_field):
        before = [{"role": "user", "content": data.prompt_template.replace("{prompt}", given)}]
    elif given is None:
        before = []
    else:
        before = row.turns(data.prompt_field, "data.prompt_field", roles=None)
    shared = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*ends, strict=False))]
    before = [*before, *shared]
    responses = [turns[len(shared) :] for turns in ends]
    for turns, name in zip(responses, (data.chosen_field, data.rejected_field), strict=True):
        if len(turns) != 1 or turns[0]["role"] != "assistant":
            got = ", ".join(turn["role"] for turn in turns) or "none"
            raise DataError(
                f"{row.origin}: '{name}' must end in one message of role assistant that the other has not, got "
                f"messages of roles: {got}; mend the row"
            )
    # the template's own words for a conversation that it refuses
    tools = row.tools(data.tools_field)
    rendered(tokenizer, [*before, *responses[0]], ask=False, origin=row.origin, tools=tools)
    for said in responses:
        require_all_written(tokenizer, [*before, *said], tools, origin=row.origin)
    return _Texts(
        prompt="".join(turn["content"] for turn in before),
        turns=tuple(before),
        chosen=responses[0][0],
        rejected=responses[1][0],
        tools=tools,
    )


def _shared_text(one: str, other: str) -> str:
    """What both begin with, up to a blank: the response begins with a word."""
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    shared = one[:length]
    # TRL cuts before the blank, so that the response's first token has it
    return shared[: shared.rfind(" ")] if " " in shared else shared
