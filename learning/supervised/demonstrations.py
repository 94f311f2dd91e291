"""Examples for supervised fine-tuning: conversations, or prompts with their completions, as token ids with a mask.

Formats are those of TRL: `messages`, or `prompt` and `completion` as text or as lists of messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhfspec.core.errors import DataError
from rlhfspec.core.settings.supervised import DemonstrationsConfig
from rlhfspec.learning.data.encoding import prompt_ids
from rlhfspec.learning.data.messages import Turn
from rlhfspec.learning.data.record import Record
from rlhfspec.learning.supervised.chat_masks import conversation_tokens, require_template
from rlhfspec.learning.supervised.rows import messages_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One sequence; the loss is taken on the tokens that the mask marks, each predicted from those before it."""

    token_ids: np.ndarray
    "[T] int64"
    is_learned: np.ndarray
    "[T] bool; never the first token, which nothing precedes"

    @property
    def num_tokens(self) -> int:
        """Of the whole sequence: what it takes of a forward."""
        return len(self.token_ids)

    @property
    def identity(self) -> bytes:
        """Equal for equal examples alone."""
        return b"%d " % len(self.token_ids) + self.token_ids.tobytes() + self.is_learned.tobytes()

    @property
    def num_learned(self) -> int:
        """Tokens that the loss is taken on."""
        return int(self.is_learned.sum())


def encode_demonstrations(
    rows: Sequence[Record], data: DemonstrationsConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Demonstration], int]:
    """Every row as an example, and how many were left out as too long or, cut, without a token to learn.

    Raises DataError naming the row: a missing field, a malformed message, one that is too long with on_long fail.
    """
    examples: list[Demonstration] = []
    for row in rows:
        ids, mask = _tokens(row, data, tokenizer)
        if len(ids) > data.token_limit and data.on_long == "fail":
            raise DataError(
                f"{row.origin} has {len(ids)} tokens, data.max_tokens is {data.token_limit}; raise it, or set "
                "data.on_long to truncate or skip"
            )
        if len(ids) > data.token_limit and data.on_long == "skip":
            continue
        ids, mask = ids[: data.token_limit], mask[: data.token_limit].copy()
        mask[:1] = False
        if mask.any():
            examples.append(Demonstration(token_ids=ids, is_learned=mask))
    if not examples:
        raise DataError(
            f"no example left of {len(rows)} rows: all are too long for data.max_tokens {data.token_limit}, or have no "
            "token to learn; raise data.max_tokens, or mend the rows"
        )
    return examples, len(rows) - len(examples)


def _tokens(
    row: Record, data: DemonstrationsConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[np.ndarray, np.ndarray]:
    name = messages_name(row, data)
    if name is not None:
        turns = row.turns(name, "data.messages_field", roles=None)
        return conversation_tokens(tokenizer, turns, origin=row.origin, tools=row.tools(data.tools_field))
    if row.holds_list(data.prompt_field):
        before = row.turns(data.prompt_field, "data.prompt_field", roles=None)
        after = row.turns(data.reference_field, "data.reference_field", roles=None)
        return _answered(row, data, before, after, tokenizer)
    given = row.text(data.prompt_field, f"data.messages_field or data.prompt_field of {_FORMATS}")
    text = data.prompt_template.replace("{prompt}", given)
    answer = row.text(data.reference_field, "data.reference_field")
    if data.chat:
        before = [{"role": "user", "content": text}]
        after = [{"role": "assistant", "content": answer}]
        return _answered(row, data, before, after, tokenizer)
    return _plain(text, answer, tokenizer)


_FORMATS = "a row with `messages`, or with `prompt` and `completion`"


def _answered(
    row: Record,
    data: DemonstrationsConfig,
    before: Sequence[Turn],
    after: Sequence[Turn],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[np.ndarray, np.ndarray]:
    """A prompt of messages with its completion: only what the assistant writes in the completion is learned."""
    tools = row.tools(data.tools_field)
    require_template(tokenizer, tools)
    turns = [*before, *after]
    return conversation_tokens(tokenizer, turns, origin=row.origin, first_turn=len(before), tools=tools)


def _plain(text: str, answer: str, tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and completion one after another as they are sampled: tokenised apart, the end token behind."""
    (prompt,) = prompt_ids(tokenizer, [text])
    end = tokenizer.eos_token_id
    response = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
    if isinstance(end, int) and (not response or response[-1] != end):
        response.append(end)
    ids = np.asarray([*prompt, *response], dtype=np.int64)
    return ids, np.arange(len(ids)) >= len(prompt)
