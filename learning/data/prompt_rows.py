"""Rows of prompt and reference: which fields hold them, and what they must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.config import DataConfig
from ...core.errors import DataError
from ...core.outside import cut
from .chat.messages import (
    Messages,
    Tools,
    Turn,
    asked_and_answered,
    is_blank,
    looks_like_messages,
    pairs_of,
    readable,
    whole_text,
)
from .left_out import LeftOut, RowFilter
from .raw_records import ReadProgress, iter_records
from .record import Columns, Record, has_field, missing_field, named_columns, top_names

_CONVERSATIONS = ("messages", "prompt", "conversation", "conversations")
"Columns that hold conversations in TRL's, verl's, LMSYS's and ShareGPT's data."
_DEFAULT_REFERENCE = DataConfig.model_fields["reference_field"].default


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record; `origin` names file and line for error messages."""

    prompt: str
    reference: str
    origin: str
    filled: str = ""
    "the prompt, of a conversation its last turn, in data.prompt_template"
    filled_for_teacher: str | None = None
    "the same in data.teacher_prompt_template, where there is one"
    teacher_ids: tuple[int, ...] = ()
    "and its token ids, once it is tokenised"
    index: int = 0
    "place among the source's rows, counted from 0"
    turns: tuple[Turn, ...] = ()
    "of a conversation, up to the one that is to be answered"
    tools: tuple[Mapping[str, Any], ...] = ()
    "that a chat template is told of"
    fields: dict[str, Any] = field(default_factory=dict)
    place: float = 0.0
    "by data.order_by"

    @property
    def messages(self) -> Messages:
        """Role and content of the turns."""
        return pairs_of(self.turns)

    @property
    def more(self) -> str:
        """What turns and tools say beside role and content."""
        return whole_text(self.turns, self.tools)


def with_tools(row: Row, tools: Tools) -> Row:
    """A row that is told of further tools, behind its own. Raises DataError: one of these has the name of one."""
    own, more = ([one.get("function", one)["name"] for one in some] for some in (row.tools, tools))
    if both := [name for name in own if name in more]:
        raise DataError(
            f"{row.origin}: its tools and environment.tools both have {cut(', '.join(both))}; expected other names; "
            "rename one, or set data.tools_field to null"
        )
    return replace(row, tools=(*row.tools, *tools)) if tools else row


def read_rows(data: DataConfig) -> list[Row]:
    """Read the rows of `data.path`, at most `data.limit`.

    Raises DataError: missing file, malformed JSON (file and line), missing or non-text field, no row.
    """
    rows: list[Row] = []
    for item in iter_rows(data, LeftOut()):
        if isinstance(item, DataError):
            raise item
        rows.append(item)
    return rows


def iter_rows(
    data: DataConfig, left_out: LeftOut, progress: ReadProgress | None = None
) -> Iterator[Row | DataError]:
    """Yield the rows of a single source, and in the place of one that cannot be used what is wrong with it.

    `left_out` counts what `data.filter` refuses; `progress` is told how far reading has come. Raises DataError where
    reading ends (missing file, damaged file, no row at all), ConfigError: `data.filter` cannot be imported.
    """
    keep = RowFilter(data.filter) if data.filter is not None else None
    if data.path is None:
        raise DataError("data.path is not set; expected a file, a folder or a data set's name")
    # a filter may read any column
    note = left_out.notes.setdefault if keep is None else lambda _: None
    reader = RowReader(data, all_columns=keep is not None, note=note)
    index = -1
    for index, record in enumerate(iter_records(data.path, data.split, reader.choose_columns, progress)):
        if index < data.skip_rows:
            continue
        if data.limit is not None and index >= data.skip_rows + data.limit:
            return
        if record.fault is not None:
            yield record.fault
            continue
        try:
            if keep is not None and not keep.keeps(record.values, record.origin):
                left_out.filtered += 1
                continue
            row = reader.row(record, index)
        except DataError as error:
            yield error
            continue
        yield row
    if index < data.skip_rows:
        more = f" more than data.skip_rows ({data.skip_rows:,})" if data.skip_rows else ""
        raise DataError(
            f"{data.path} is empty: expected at least one record{more}, got {index + 1 or 'none'}; check data.path"
        )


class RowReader:
    """Makes rows of a source's records; the first one says whether they are conversations."""

    def __init__(
        self, data: DataConfig, *, all_columns: bool = False, note: Callable[[str], object] | None = None
    ) -> None:
        self._data = data
        self._all_columns = all_columns
        self._columns = Columns("row.prompt", data, note)
        self._prompt, self._key, self._is_conversation = "", "", False
        "the column of prompts, the setting that names it"
        self._named: dict[str, str] = {}
        "columns that the templates of prompts name, and which setting does"
        self._read = dict[str, None]()
        "columns that settings name; none before the first record"

    def choose_columns(self, kinds: Mapping[str, bool], origin: str) -> list[str] | None:
        """Return the columns that are used, None for all. Raises DataError where one is missing."""
        for name, key in self._plan(kinds, origin).items():
            if not has_field(kinds, name):
                raise missing_field(origin, name, key, kinds)
        looked_at = {name for name in kinds if name in self._read or self._columns.is_refused(name)}
        self._columns.require(dict.fromkeys(kinds.keys() - looked_at, True), self._read, origin)
        return None if self._all_columns else [name for name in kinds if name in looked_at]

    def _plan(self, kinds: Mapping[str, bool], origin: str) -> dict[str, str]:
        """See which columns are read; returns those that must be there, and the setting that names each."""
        data = self._data
        if not self._prompt:
            named = named_columns(data.prompt_template, kinds)
            prompt, key, is_conversation = _prompt_of(data, kinds, named, origin)
            if "{prompt}" not in data.prompt_template and (is_conversation or not named):
                kind = "conversations" if is_conversation else f"rows of {cut(', '.join(kinds))}"
                raise DataError(
                    f"{origin}: data.prompt_template fills nothing of {kind} in; expected {{prompt}}"
                    f"{'' if is_conversation else ', or a column by its name'}; put it in"
                )
            self._prompt, self._key, self._is_conversation = prompt, key, is_conversation
            of_teacher = named_columns(data.teacher_prompt_template or "", kinds)
            self._named = dict.fromkeys(of_teacher, "data.teacher_prompt_template") | dict.fromkeys(
                named, "data.prompt_template"
            )
        wanted = {self._prompt: self._key} | dict.fromkeys(data.reward_fields, "data.reward_fields")
        wanted |= self._named
        wanted |= {} if data.order_by is None else {data.order_by: "data.order_by"}
        if data.reference_field is not None and not (self._is_conversation and _may_be_cut(data, kinds)):
            wanted[data.reference_field] = "data.reference_field"
        tools = data.tools_field if self._is_conversation or data.chat else None
        self._read = top_names([*wanted, tools], kinds)
        return wanted

    def row(self, record: Record, index: int) -> Row:
        """Raises DataError: a field is missing or not of its kind."""
        data, values, origin = self._data, record.values, record.origin
        if not self._prompt:
            self._plan({name: looks_like_messages(value) for name, value in values.items()}, origin)
        self._columns.require(values, self._read, origin)
        turns, answer = (), ""
        if self._is_conversation:
            given = record.turns(self._prompt, self._key)
            turns, answer = asked_and_answered(given, f"{origin}: field '{self._prompt}'")
            prompt = readable(pairs_of(turns))
        else:
            prompt = record.text(self._prompt, self._key)
            if looks_like_messages(prompt):
                raise DataError(
                    f"{origin}: field '{self._prompt}' is a conversation as JSON text, expected plain text of "
                    "data.prompt_field; name the field by data.messages_field, which reads it"
                )
            if is_blank(prompt) and (data.chat or data.prompt_template != "{prompt}"):
                raise DataError(
                    f"{origin}: field '{self._prompt}' is empty; expected text to answer, or leave the row out by "
                    "data.filter"
                )
        if data.reference_field is None:
            reference = ""
        elif self._is_conversation and _may_be_cut(data, values):
            reference = answer
        else:
            reference = record.text(data.reference_field, "data.reference_field")
        fields = {name: record.plain(name, "data.reward_fields") for name in data.reward_fields}
        for name, key in self._named.items():
            record.find(name, key)  # a row without it is no row whose braces stay
        asked = turns[-1]["content"] if turns else prompt
        return Row(
            prompt=prompt,
            reference=reference,
            origin=origin,
            filled=record.filled(data.prompt_template, asked),
            filled_for_teacher=record.for_teacher(data, asked, reference),
            index=index,
            turns=turns,
            tools=record.tools(data.tools_field) if turns or data.chat else (),
            fields=fields,
            place=0.0 if data.order_by is None else record.number(data.order_by, "data.order_by"),
        )


def _prompt_of(
    data: DataConfig, kinds: Mapping[str, bool], named: Sequence[str], origin: str
) -> tuple[str, str, bool]:
    """The column of prompts, the setting that names it, and whether it holds conversations."""
    if data.messages_field is not None:
        return data.messages_field, "data.messages_field", True
    if has_field(kinds, data.prompt_field):
        return data.prompt_field, "data.prompt_field", kinds.get(data.prompt_field, False)
    if named and "{prompt}" not in data.prompt_template:
        return named[0], "data.prompt_template", False
    for name in _CONVERSATIONS:
        # text by these names may be a conversation as JSON, which columns do not say
        if kinds.get(name) or (name in kinds and name != "prompt"):
            return name, "data.prompt_field", True
    raise missing_field(origin, data.prompt_field, "data.prompt_field", kinds)


def _may_be_cut(data: DataConfig, fields: Mapping[str, Any]) -> bool:
    """A conversation's reference is its own last answer where the column that is meant by default is not there."""
    return data.reference_field == _DEFAULT_REFERENCE and data.reference_field not in fields
