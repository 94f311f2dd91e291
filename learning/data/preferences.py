"""Preferences: rows of a prompt and two responses, and what is learned of each.

Formats are those of TRL: `prompt`, `chosen`, `rejected` as text or as lists of messages; without `prompt` the two begin
with it alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...core.errors import DataError
from ...core.settings.supervised import PreferencesConfig
from ...core.surfaces.surface import note_once
from .chat.chat_masks import is_learned, rendered, require_all_written, require_template
from .chat.messages import Tools, Turn, num_shared
from .chat.scored_text import render
from .left_out import Remarks
from .record import Record
from .supervised_rows import Note, asked


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """Two sequences, of which the first is to score higher."""

    chosen_ids: np.ndarray
    "[T] int64"
    rejected_ids: np.ndarray
    "[U] int64"
    margin: float = 0.0

    @property
    def sequences(self) -> tuple[np.ndarray, np.ndarray]:
        """What is computed of it."""
        return self.chosen_ids, self.rejected_ids

    @property
    def num_tokens(self) -> int:
        """Of both."""
        return len(self.chosen_ids) + len(self.rejected_ids)

    @property
    def identity(self) -> bytes:
        """Equal for equal pairs alone."""
        lengths = b"%d %d %r " % (len(self.chosen_ids), len(self.rejected_ids), self.margin)
        return lengths + self.chosen_ids.tobytes() + self.rejected_ids.tobytes()


_Texts = tuple[str, tuple[Turn, ...], tuple[str | Turn, str | Turn], Tools]
"Prompt, turns, what is chosen and rejected (of messages the turn whole), tools."


def encode_preferences(
    rows: Sequence[Record],
    data: PreferencesConfig,
    tokenizer: PreTrainedTokenizerBase,
    note: Note | None = None,
) -> tuple[list[PreferencePair], int]:
    """Every row as a pair, and how many were left out as too long.

    `note` hears of keys that nothing reads. Raises DataError naming the row: a missing field, a malformed message, two
    equal responses (as text or as tokens), a margin that is no number, a sequence that is too long with on_long fail,
    or a response that alone is too long.
    """
    pairs: list[PreferencePair] = []
    num_full = 0
    remarks = Remarks(tokenizer)
    for row in rows:
        prompt, turns, responses, tools = _texts(row, data, tokenizer, note)
        remarks.turns(turns, row.origin)
        if responses[0] == responses[1]:
            raise DataError(
                f"{row.origin}: chosen and rejected are the same response; expected two, take it out"
            )
        limit = data.token_limit if data.on_long == "truncate" else None
        both = [
            render(tokenizer, prompt, turns, response, max_tokens=limit, tools=tools)
            for response in responses
        ]
        longest = max(len(ids) for ids in both)
        num_full += longest == limit
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
    if num_full:
        line = f"{num_full:,} of {len(rows):,} pairs fill data.max_tokens {data.token_limit}: prompts that were longer"
        remarks.notes([f"{line} lost their beginning; raise it, or set data.on_long to skip"])
    for line in remarks.lines:
        (note or note_once)(line)
    return pairs, len(rows) - len(pairs)


def _margin(row: Record, data: PreferencesConfig) -> float:
    name = data.margin_field or "margin"
    if data.margin_field is None and row.values.get(name) is None:
        return 0.0
    value = row.find(name, "data.margin_field")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{row.origin}: field '{name}' must be a finite number, got {value!r}")
    return float(value)


def _texts(
    row: Record, data: PreferencesConfig, tokenizer: PreTrainedTokenizerBase, note: Note | None
) -> _Texts:
    if row.holds_list(data.chosen_field) or row.holds_list(data.rejected_field):
        require_template(tokenizer, row.tools(data.tools_field))
        return _of_messages(row, data, tokenizer, note)
    chosen = row.text(data.chosen_field, "data.chosen_field")
    rejected = row.text(data.rejected_field, "data.rejected_field")
    if "{prompt}" in data.prompt_template and row.values.get(data.prompt_field) is None:
        prompt = chosen[: num_shared(chosen, rejected)]
        # the response begins with a word, and as in TRL its first token has the blank before it
        prompt = prompt[: prompt.rfind(" ")] if " " in prompt else prompt
        return prompt, (), (chosen[len(prompt) :], rejected[len(prompt) :]), ()
    text = asked(row, data, "data.prompt_field")
    if not data.chat:
        return text, (), (chosen, rejected), ()
    tools = row.tools(data.tools_field)
    require_template(tokenizer, tools)
    turns = ({"role": "user", "content": text},)
    if tools:
        answered = (*turns, {"role": "assistant", "content": chosen})
        require_all_written(tokenizer, answered, tools, origin=row.origin)
    return text, turns, (chosen, rejected), tools


def _of_messages(
    row: Record, data: PreferencesConfig, tokenizer: PreTrainedTokenizerBase, note: Note | None
) -> _Texts:
    ends = [
        row.turns(data.chosen_field, "data.chosen_field", roles=None),
        row.turns(data.rejected_field, "data.rejected_field", roles=None),
    ]
    given = row.values.get(data.prompt_field)
    if isinstance(given, str) and not row.holds_list(data.prompt_field):
        before = [{"role": "user", "content": row.filled(data.prompt_template, given)}]
    elif given is None:
        before = []
    else:
        before = row.turns(data.prompt_field, "data.prompt_field", roles=None)
    shared = num_shared(*ends)
    before = [*before, *ends[0][:shared]]
    responses = [turns[shared:] for turns in ends]
    for turns, name in zip(responses, (data.chosen_field, data.rejected_field), strict=True):
        if len(turns) != 1 or turns[0]["role"] != "assistant":
            got = ", ".join(turn["role"] for turn in turns) or "none"
            raise DataError(
                f"{row.origin}: '{name}' must end in one message of role assistant that the other has not, got "
                f"messages of roles: {got}; fix the row"
            )
        if not is_learned(turns[0], f"{row.origin}: '{name}'"):
            raise DataError(
                f"{row.origin}: '{name}' says that it is not learned; expected both of a pair to be; take the row out"
            )
    # the template's own words for a conversation that it refuses
    tools = row.tools(data.tools_field)
    rendered(tokenizer, [*before, *responses[0]], ask=False, origin=row.origin, tools=tools)
    for said in responses:
        require_all_written(tokenizer, [*before, *said], tools, origin=row.origin, note=note)
    prompt = "".join(turn["content"] for turn in before)
    return prompt, tuple(before), (responses[0][0], responses[1][0]), tools
