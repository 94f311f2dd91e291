"""Rows of a data set for supervised training, which of them are held out, and what is learned of each.

Formats are those of TRL. Demonstrations: `messages`, `prompt` and `completion` as text or as lists of messages, or one
whole text (`data.text_field`). Preferences: see `preferences` and `feedback`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...core.errors import DataError
from ...core.outside import cut
from ...core.settings.supervised import (
    DemonstrationsConfig,
    ExamplesConfig,
    FeedbackConfig,
    PairsConfig,
    PreferencesConfig,
)
from ...core.surfaces.surface import note_once
from .chat.chat_masks import conversation_tokens, require_once
from .chat.end_tokens import turn_end
from .chat.messages import Turn, num_shared, role_and_content, turn_list
from .left_out import Remarks
from .prompt_tokens import prompt_ids
from .raw_records import iter_records
from .record import Columns, Record, named_columns, top_names

Note = Callable[[str], object]
_HELD_OUT = 0x5EED
"In the seed of the split, so that it is not the seed of the rows' order."


def read_raw_rows(
    data: ExamplesConfig, *, seed: int, note: Note | None = None
) -> tuple[list[Record], list[Record]]:
    """The rows to learn from and those that are held out, each in the order of its file.

    `note` hears of columns that nothing reads. Raises DataError: a file that is missing, malformed (naming the line) or
    empty, or too short to hold any row out; a column that cannot be left unread.
    """
    kind = "row.sft" if isinstance(data, DemonstrationsConfig) else "row.preference"
    if isinstance(data, FeedbackConfig):
        kind = "row.dpo"
    each = _each(data)
    columns = [Columns(kind, one, note) for one in each]
    sources = each[:-1] or each
    rows = [
        replace(row, source=index)
        for index, source in enumerate(sources)
        for row in _some(source, source.path or "", "data.path", columns[index])
    ]
    if data.eval_path is not None:
        held_out = [
            replace(row, source=-1) for row in _some(data, data.eval_path, "data.eval_path", columns[-1])
        ]
        if note is not None:
            _note_overlap(rows, held_out, each, note)
        return rows, held_out
    num_held_out = round(len(rows) * data.eval_share)
    if data.eval_share > 0.0:
        num_held_out = max(num_held_out, 1)
    if num_held_out >= len(rows):
        raise DataError(
            f"{', '.join(str(source.path) for source in sources)} has {len(rows)} row(s), too few to learn from some "
            f"and hold {num_held_out} out; expected more, or name data.eval_path, or set data.eval_share to 0"
        )
    order = np.random.default_rng([seed, _HELD_OUT]).permutation(len(rows))
    prompts = [_prompt_of(row, each) for row in rows]
    if len(set(prompts)) == 1:  # of one prompt only rows can be held out
        prompts = [row.origin for row in rows]
    chosen = _with_equals(order.tolist(), prompts, num_held_out)
    learned = [row for index, row in enumerate(rows) if index not in chosen]
    return learned, [rows[index] for index in sorted(chosen)]


def _each(data: ExamplesConfig) -> tuple[ExamplesConfig, ...]:
    """What is said of the rows of each source, by its number, and at the end of those of data.eval_path."""
    if isinstance(data, DemonstrationsConfig) and data.sources:
        return (*data.each_source(), data)
    return (data,)


def _note_overlap(
    rows: Sequence[Record], held_out: Sequence[Record], each: Sequence[ExamplesConfig], note: Note
) -> None:
    trained = {_prompt_of(row, each) for row in rows}
    of = partial(_prompt_of, each=each)
    if len(trained) == 1:  # what is asked is no difference
        trained, of = {repr(row.values) for row in rows}, lambda row: repr(row.values)
    known = [row.origin for row in held_out if of(row) in trained]
    if known:
        note(
            f"{len(known):,} of {len(held_out):,} rows of data.eval_path ask what training rows ask, the first "
            f"{known[0]}: what they score is no measure of new ones; take them out of one of the two"
        )


def _with_equals(order: Sequence[int], prompts: Sequence[str], num_held_out: int) -> set[int]:
    """About so many rows in the order drawn, each with all rows of its prompt; at least one prompt is left."""
    by_prompt: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_prompt.setdefault(prompt, []).append(index)
    held_out: set[int] = set()
    num_left = len(by_prompt)
    for index in order:
        if len(held_out) >= num_held_out or num_left == 1:
            break
        if index not in held_out:
            held_out.update(by_prompt[prompts[index]])
            num_left -= 1
    return held_out


def _prompt_of(row: Record, each: Sequence[ExamplesConfig]) -> str:
    """What rows of one prompt have alike: the field, or the turns up to where the assistant first answers."""
    data = each[row.source]
    if isinstance(data, DemonstrationsConfig) and data.text_field is not None:
        return row.text(data.text_field, "data.text_field")
    given = row.values.get(data.prompt_field)
    if "{prompt}" not in data.prompt_template and named_columns(data.prompt_template, row.values):
        given = row.filled(data.prompt_template, "")
    if given is None:
        name = messages_name(row, data) if isinstance(data, DemonstrationsConfig) else None
        name = data.chosen_field if isinstance(data, PairsConfig) else name
        given = turn_list(row.values.get(name)) if name is not None else None
        other = row.values.get(data.rejected_field) if isinstance(data, PairsConfig) else None
        if isinstance(given, str) and isinstance(other, str):
            given = given[: num_shared(given, other)]
        elif isinstance(given, list):
            answers = (isinstance(turn, dict) and role_and_content(turn)[0] == "assistant" for turn in given)
            given = given[: next((place for place, answer in enumerate(answers) if answer), len(given))]
    given = turn_list(given)
    if isinstance(given, list):
        return "\n\n".join(_words(turn) for turn in given)
    return given.strip() if isinstance(given, str) else repr(given if given is not None else row.origin)


def _words(turn: Any) -> str:
    """A message as text, a user's as a plain prompt has it."""
    role, content = role_and_content(turn) if isinstance(turn, dict) else (None, None)
    return content.strip() if role in ("user", "human") and isinstance(content, str) else repr(turn)


def messages_name(row: Record, data: DemonstrationsConfig) -> str | None:
    """The field that holds the row's conversation: `data.messages_field`, or ShareGPT's; None for a row without."""
    names = [data.messages_field, *(["conversations"] if data.messages_field == "messages" else [])]
    return next((name for name in names if row.values.get(name) is not None), None)


def is_unpaired(row: Record, data: FeedbackConfig) -> bool:
    """Whether a row has one response and its label in place of a pair."""
    return row.values.get(data.label_field) is not None


def _read_of(row: Record, data: ExamplesConfig, named: Sequence[str]) -> dict[str, None]:
    """The columns of a row that are read."""
    fields: list[str | None] = [data.prompt_field, *named]
    is_chat = data.chat or row.holds_list(data.prompt_field)
    if isinstance(data, DemonstrationsConfig):
        fields.append(data.weight_field)
    if isinstance(data, DemonstrationsConfig) and data.text_field is not None:
        return top_names([data.text_field, data.weight_field], row.values)
    if isinstance(data, FeedbackConfig) and is_unpaired(row, data):
        fields += [data.reference_field, data.label_field]
    elif isinstance(data, PairsConfig):
        is_chat = is_chat or row.holds_list(data.chosen_field)
        fields += [data.chosen_field, data.rejected_field]
        fields += [data.margin_field or "margin"] if isinstance(data, PreferencesConfig) else []
    elif isinstance(data, DemonstrationsConfig) and (name := messages_name(row, data)) is not None:
        is_chat, fields[:] = True, [name, data.weight_field]
    elif isinstance(data, DemonstrationsConfig):
        fields += [data.reference_field]
    return top_names([*fields, data.tools_field if is_chat else None], row.values)


def _some(data: ExamplesConfig, path: str, key: str, unread: Columns) -> list[Record]:
    rows: list[Record] = []
    for record in iter_records(path, data.split, key=key):
        if record.fault is not None:
            raise record.fault
        rows.append(record)
        if data.limit is not None and len(rows) >= data.limit:
            break
    if not rows:
        raise DataError(f"{path} is empty: expected at least one record, got none; check {key}")
    columns = {name for row in rows for name in row.values}
    named = named_columns(data.prompt_template, columns)
    if not named and "{prompt}" not in data.prompt_template:
        raise DataError(
            f"{path}: data.prompt_template names no column of {cut(', '.join(sorted(columns)))}; expected {{prompt}} "
            "or one of them; put it in"
        )
    for row in rows:
        unread.require(row.values, _read_of(row, data, named), row.origin)
        for name in named:
            row.find(name, "data.prompt_template")
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One sequence; the loss is taken on the tokens that the mask marks, each predicted from those before it."""

    token_ids: np.ndarray
    "[T] int64"
    is_learned: np.ndarray
    "[T] bool; never the first token, which nothing precedes"
    weight: float = 1.0
    "by which its loss counts"
    source: int = 0
    "which of data.sources it is of"

    @property
    def sequences(self) -> tuple[np.ndarray]:
        """What is computed of it."""
        return (self.token_ids,)

    @property
    def num_tokens(self) -> int:
        """Of the whole sequence."""
        return len(self.token_ids)

    @property
    def identity(self) -> bytes:
        """Equal for equal examples alone."""
        weight = b"" if self.weight == 1.0 else b"%r" % self.weight
        return b"%d " % len(self.token_ids) + self.token_ids.tobytes() + self.is_learned.tobytes() + weight

    @property
    def num_learned(self) -> int:
        """Tokens that the loss is taken on."""
        return int(self.is_learned.sum())


def encode_demonstrations(
    rows: Sequence[Record],
    data: DemonstrationsConfig,
    tokenizer: PreTrainedTokenizerBase,
    note: Note | None = None,
) -> tuple[list[Demonstration], int]:
    """Every row as an example, and how many were left out as too long or, cut, without a token to learn.

    `note` hears of keys that nothing reads. Raises DataError naming the row: a missing field, a malformed message, one
    that is too long with on_long fail.
    """
    examples: list[Demonstration] = []
    maker = ExampleMaker(data, tokenizer, note)
    for row in rows:
        example = maker.fitting(*maker.tokens(row), row)
        examples += [] if example is None else [example]
    if examples and not any(example.weight for example in examples):
        raise DataError(
            f"all {len(examples)} rows have weight 0 (data.weight_field): there is nothing to learn"
        )
    if not examples:
        raise DataError(
            f"no example left of {len(rows)} rows: all are too long for data.max_tokens {data.token_limit}, or have no "
            "token to learn; raise data.max_tokens, or fix the rows"
        )
    maker.tell(f"{len(rows):,} rows")
    return examples, len(rows) - len(examples)


class ExampleMaker:
    """Makes examples of rows, and says what it cut of them."""

    def __init__(
        self,
        data: DemonstrationsConfig | FeedbackConfig,
        tokenizer: PreTrainedTokenizerBase,
        note: Note | None,
    ) -> None:
        self._data, self._tokenizer, self._note = data, tokenizer, note
        self._each: Sequence[Any] = _each(data)
        closing = turn_end(tokenizer)
        self._ends = () if closing is None else (closing,)
        self._remarks = Remarks(tokenizer)
        self._lost: list[bool] = []

    def tokens(self, row: Record) -> tuple[np.ndarray, np.ndarray]:
        """Ids [T] of a row's conversation, or of prompt and completion, and which are learned."""
        return _tokens(row, self._each[row.source], self.of_conversation, self._tokenizer)

    def of_conversation(self, turns: Sequence[Turn], **more: Any) -> tuple[np.ndarray, np.ndarray]:
        """See `conversation_tokens`."""
        self._remarks.turns(turns, more["origin"])
        return conversation_tokens(self._tokenizer, turns, ends=self._ends, note=self._note, **more)

    def fitting(self, ids: np.ndarray, mask: np.ndarray, row: Record) -> Demonstration | None:
        """An example within data.max_tokens; None: left out. Raises DataError: too long, with on_long fail."""
        limit = self._data.token_limit
        if len(ids) > limit and self._data.on_long == "fail":
            raise DataError(
                f"{row.origin} has {len(ids)} tokens, data.max_tokens is {limit}; raise it, or set data.on_long to "
                "truncate or skip"
            )
        if len(ids) > limit and self._data.on_long == "skip":
            return None
        kept, behind = mask[:limit].copy(), mask[limit:]
        kept[:1] = False
        if not kept.any():
            return None
        self._lost += [bool(behind.any())] if len(behind) else []
        name = getattr(self._each[row.source], "weight_field", None)
        weight = 1.0 if name is None else _weight(row, name)
        return Demonstration(token_ids=ids[:limit], is_learned=kept, weight=weight, source=max(row.source, 0))

    def tell(self, of: str) -> None:
        """Note what was cut, and what else a user should know."""
        if self._lost:
            line = f"{len(self._lost):,} of {of} lost their end, {sum(self._lost):,} of them a learned one"
            advice = f"(data.max_tokens {self._data.token_limit}); raise it, or set data.on_long to skip"
            self._remarks.notes([f"{line} {advice}"])
        for line in self._remarks.lines:
            (self._note or note_once)(line)


_MOST_WEIGHT = 1e6


def _weight(row: Record, name: str) -> float:
    value = row.number(name, "data.weight_field")
    if not 0.0 <= value <= _MOST_WEIGHT:
        raise DataError(
            f"{row.origin}: field '{name}' must be a number from 0 to {_MOST_WEIGHT:g}, got {value!r}; fix the row"
        )
    return value


def _tokens(
    row: Record,
    data: DemonstrationsConfig | FeedbackConfig,
    of_conversation: Callable[..., tuple[np.ndarray, np.ndarray]],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[np.ndarray, np.ndarray]:
    of_sft = data if isinstance(data, DemonstrationsConfig) else DemonstrationsConfig(path=data.path)
    loss_on, system = of_sft.loss_on, of_sft.system_prompt
    if of_sft.text_field is not None:
        text = row.text(of_sft.text_field, "data.text_field")
        return plain_tokens(text, None, tokenizer, learns_all=True)
    name = messages_name(row, data) if isinstance(data, DemonstrationsConfig) else None
    before: Sequence[Turn] = ()
    if name is not None:
        if loss_on == "completion":
            raise DataError(
                f"{row.origin}: data.loss_on is completion, and the row has messages; expected `{data.prompt_field}` "
                f"and `{data.reference_field}`; split it, or set assistant or all"
            )
        after = row.turns(name, "data.messages_field", roles=None)
    elif row.holds_list(data.prompt_field):
        # only what the assistant writes in the completion is learned
        before = row.turns(data.prompt_field, "data.prompt_field", roles=None)
        after = row.turns(data.reference_field, "data.reference_field", roles=None)
    else:
        text = asked(row, data, f"data.messages_field or data.prompt_field of {_FORMATS}")
        answer = row.text(data.reference_field, "data.reference_field")
        if not data.chat:
            if system is not None:
                raise DataError(
                    f"{row.origin}: data.system_prompt needs a conversation, got plain text; set data.chat to true, or "
                    "write it into data.prompt_template"
                )
            require_once(text, answer, row.origin)
            return plain_tokens(text, answer, tokenizer, learns_all=loss_on == "all")
        before, after = [{"role": "user", "content": text}], [{"role": "assistant", "content": answer}]
    if data.prompt_template != "{prompt}" and not data.chat:
        raise DataError(
            f"{row.origin}: data.prompt_template fills nothing of conversations in; expected rows of plain prompts, or "
            "no template; take it out"
        )
    if system is not None and [*before, *after][0]["role"] not in ("system", "developer"):
        before = [{"role": "system", "content": system}, *before]
    return of_conversation(
        [*before, *after],
        origin=row.origin,
        first_turn=len(before),
        tools=row.tools(data.tools_field),
        loss_on=loss_on or "assistant",
    )


def asked(row: Record, data: ExamplesConfig, key: str) -> str:
    """A plain prompt in data.prompt_template, which may name other columns alone."""
    given = row.text(data.prompt_field, key) if "{prompt}" in data.prompt_template else ""
    return row.filled(data.prompt_template, given)


_FORMATS = "a row with `messages`, with `prompt` and `completion`, or with a text (data.text_field)"


def plain_tokens(
    text: str, answer: str | None, tokenizer: PreTrainedTokenizerBase, *, learns_all: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and completion one after another as they are sampled: tokenised apart, the end token behind; or a text."""
    (prompt,) = prompt_ids(tokenizer, [text])
    end = tokenizer.eos_token_id
    response = [] if answer is None else list(tokenizer(answer, add_special_tokens=False)["input_ids"])
    last = (prompt if answer is None else response)[-1:]
    if isinstance(end, int) and list(last) != [end]:
        response.append(end)
    ids = np.asarray([*prompt, *response], dtype=np.int64)
    return ids, np.arange(len(ids)) >= (0 if learns_all else len(prompt))
