"""What a data set holds, as the model would see it: counts, lengths, duplicates, faults, samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...core.config import DataConfig
from ...core.errors import DataError
from .encoding import PromptEncoder, Rendered
from .left_out import LeftOut, Seen
from .prompt_rows import Row
from .prompts import Tick, source_rows
from .raw_records import ReadProgress

MAX_FAULTS = 10
"Faults that are spelled out."
NUM_SAMPLES = 3
NUM_LAST = 6
"Tokens at a prompt's end that are shown one by one."
_ROWS_AT_ONCE = 1024
_BINS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of prompts; `edges` has one number more than `counts`."""

    p50: int
    p90: int
    p99: int
    max: int
    edges: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt as the model sees it."""

    origin: str
    text: str
    num_tokens: int | None
    reference: str
    last_tokens: list[tuple[int, str]] = field(default_factory=list)
    "id and text of those that the response follows"


@dataclass(slots=True, kw_only=True)
class DataReport:
    """What `rlhfspec data check` says. Counts are of rows read; a row that is no prompt is a fault."""

    name: str
    unit: str
    "tokens, or characters where there is no tokenizer"
    num_rows: int = 0
    num_prompts: int = 0
    "that a run would train on"
    conversations: int = 0
    roles: dict[str, int] = field(default_factory=dict)
    "turns by role"
    fields: dict[str, int] = field(default_factory=dict)
    "columns of the rows, and in how many rows each stands"
    rewritten: int = 0
    "conversations of which a system's or user's turn is not in the template's text as it is in the row"
    empty: int = 0
    duplicates: int = 0
    "prompts that came before, but for case, white space and Unicode form"
    too_long: int = 0
    too_short: int = 0
    filtered: int = 0
    num_faults: int = 0
    faults: list[str] = field(default_factory=list)
    "the first ones"
    notes: list[str] = field(default_factory=list)
    "what nothing reads: columns, keys of messages"
    lengths: Lengths | None = None
    samples: list[Sample] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def data_report(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase | None, *, seed: int, tick: Tick | None = None
) -> DataReport:
    """Read everything that `data` describes and go on after faults.

    Without a tokenizer lengths are in characters, conversations are shown as their turns, and nothing is too long.
    Raises ConfigError for `data.filter`, DataError for a template that cannot be read.
    """
    sources = data.each_source()
    reader = _Reader(data, tokenizer, " + ".join(source.name for source in sources))
    for source in sources:
        reader.read(source, seed, tick or (lambda stage, fraction: None))
    return reader.report()


class _Reader:
    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase | None, name: str) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._out = DataReport(name=name, unit="characters" if tokenizer is None else "tokens")
        self._left_out = LeftOut()
        self._near = Seen("normalized")
        self._seen = Seen(data.deduplicate) if data.deduplicate != "none" else None
        self._roles: Counter[str] = Counter()
        self._fields: Counter[str] = Counter()
        self._lengths: list[int] = []

    def read(self, data: DataConfig, seed: int, tick: Tick) -> None:
        """Count the rows of one source."""
        encoder, progress = PromptEncoder(data, self._tokenizer), ReadProgress()
        waiting: list[tuple[Row, Rendered]] = []
        try:
            for item in source_rows(data, seed, self._left_out, progress, self._fields):
                self._out.num_rows += 1
                if isinstance(item, DataError):
                    self._fault(item)
                else:
                    self._take(item, encoder, waiting)
                if len(waiting) >= _ROWS_AT_ONCE:
                    self._measure(waiting, encoder)
                    waiting = []
                if self._out.num_rows % _ROWS_AT_ONCE == 0:
                    tick(data.name, progress.fraction)
        except DataError as error:  # what ends a source
            self._fault(error)
        self._measure(waiting, encoder)
        self._out.notes = [*dict.fromkeys([*self._out.notes, *self._left_out.notes, *encoder.notes])]

    def report(self) -> DataReport:
        """What was counted."""
        out, left_out = self._out, self._left_out
        out.num_rows += left_out.filtered
        out.filtered = left_out.filtered
        out.roles = dict(self._roles.most_common())
        out.fields = dict(self._fields.most_common())
        out.lengths = _lengths(self._lengths)
        return out

    def _take(self, row: Row, encoder: PromptEncoder, waiting: list[tuple[Row, Rendered]]) -> None:
        out = self._out
        out.conversations += bool(row.messages)
        self._roles.update(role for role, _ in row.messages)
        seen = (row.prompt, row.messages, row.more)
        out.duplicates += self._near.before(*seen)
        if self._seen is not None and self._seen.before(*seen):
            return
        try:
            rendered = encoder.render(row)
        except DataError as error:
            self._fault(error)
            return
        waiting.append((row, rendered))
        given = (content for role, content in rendered.messages if role in ("system", "developer", "user"))
        out.rewritten += any(content not in rendered.text for content in given)

    def _measure(self, waiting: list[tuple[Row, Rendered]], encoder: PromptEncoder) -> None:
        out, data = self._out, self._data
        all_ids: list[list[int]] = [[] for _ in waiting]
        if self._tokenizer is None:
            lengths = [len(rendered.text) for _, rendered in waiting]
        else:
            all_ids = encoder.token_ids([rendered for _, rendered in waiting])
            lengths = [len(ids) for ids in all_ids]
        for (row, rendered), ids, length in zip(waiting, all_ids, lengths, strict=True):
            self._lengths.append(length)
            if length == 0:
                out.empty += 1
                self._fault(DataError(f"{row.origin}: the prompt is empty; expected at least one token"))
            elif self._tokenizer is not None and length > data.max_prompt_tokens:
                out.too_long += 1
                if data.on_long_prompt == "fail":
                    self._fault(
                        DataError(
                            f"{row.origin}: the prompt has {length:,} tokens, data.max_prompt_tokens is "
                            f"{data.max_prompt_tokens}; raise it, or set data.on_long_prompt to skip"
                        )
                    )
            elif self._tokenizer is not None and length < data.min_prompt_tokens:
                out.too_short += 1
            else:
                out.num_prompts += 1
                if len(out.samples) < NUM_SAMPLES:
                    tokens = None if self._tokenizer is None else length
                    sample = Sample(
                        origin=row.origin,
                        text=rendered.text,
                        num_tokens=tokens,
                        reference=row.reference,
                        last_tokens=[(one, self._text_of(one)) for one in ids[-NUM_LAST:]],
                    )
                    out.samples.append(sample)

    def _text_of(self, token: int) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _fault(self, error: DataError) -> None:
        self._out.num_faults += 1
        if len(self._out.faults) < MAX_FAULTS:
            self._out.faults.append(str(error))


def _lengths(values: Sequence[int]) -> Lengths | None:
    if not values:
        return None
    lengths = np.asarray(values)
    p50, p90, p99 = (int(np.quantile(lengths, q, method="higher")) for q in (0.5, 0.9, 0.99))
    low, high = int(lengths.min()), int(lengths.max())
    bins = min(_BINS, high - low + 1)
    edges = np.unique(np.linspace(low, high + 1, bins + 1).round().astype(int))
    counts, _ = np.histogram(lengths, bins=edges)
    return Lengths(
        p50=p50,
        p90=p90,
        p99=p99,
        max=high,
        edges=tuple(int(edge) for edge in edges),
        counts=tuple(int(count) for count in counts),
    )
