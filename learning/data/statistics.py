"""What a data set holds, as the model would see it: counts, lengths, faults by kind, samples."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

from ...core.config import DataConfig
from ...core.errors import DataError
from .encoding import PromptEncoder, Rendered
from .left_out import LeftOut, Seen
from .prompt_rows import Row
from .prompts import source_rows

NUM_SAMPLES = 3
_ROWS_AT_ONCE = 1024


class DataReport:
    """What `rlhfspec data check` says. Counts are of rows read; a row that is no prompt is a fault."""

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase | None, *, seed: int) -> None:
        """Read everything that `data` describes and go on after faults.

        Without a tokenizer lengths are in characters, conversations are shown as their turns, and nothing is too long.
        Raises ConfigError for `data.filter`, DataError for a template that cannot be read.
        """
        self._data, self._tokenizer = data, tokenizer
        self._seen = Seen(data.deduplicate) if data.deduplicate != "none" else None
        self.name = " + ".join(source.name for source in data.each_source())
        self.unit = "characters" if tokenizer is None else "tokens"
        self.num_rows = self.num_prompts = 0
        self.left_out = LeftOut()
        self.lengths: list[int] = []
        "of what could be read, too long ones too"
        self.samples: list[tuple[Row, str, int]] = []
        "with text and length as the model sees it"
        self.faults: dict[str, tuple[int, str]] = {}
        "how many and the first, by kind: what a message says behind its row, without numbers"
        for source in data.each_source():
            self._read(source, seed)
        self.num_rows += self.left_out.filtered
        self.num_faults = sum(count for count, _ in self.faults.values())

    def _read(self, data: DataConfig, seed: int) -> None:
        encoder, waiting = PromptEncoder(data, self._tokenizer), list[tuple[Row, Rendered]]()
        rows = source_rows(data, seed, self.left_out)
        while True:
            try:
                item = next(rows, None)
                if item is None:
                    break
                self.num_rows += 1
                if isinstance(item, DataError):
                    self._fault(item)
                elif self._seen is not None and self._seen.before(item.prompt, item.messages, item.more):
                    self.left_out.duplicates += 1
                else:
                    waiting.append((item, encoder.render(item)))
            except DataError as error:  # of a row, or what ends a source
                self._fault(error)
            if len(waiting) >= _ROWS_AT_ONCE:
                self._measure(waiting, encoder)
                waiting = []
        self._measure(waiting, encoder)
        self.left_out.notes |= encoder.notes

    def _measure(self, waiting: list[tuple[Row, Rendered]], encoder: PromptEncoder) -> None:
        data, texts = self._data, [rendered for _, rendered in waiting]
        plain = self._tokenizer is None
        lengths = [len(one.text) for one in texts] if plain else map(len, encoder.token_ids(texts))
        for (row, rendered), length in zip(waiting, lengths, strict=True):
            self.lengths.append(length)
            if length == 0:
                self._fault(DataError(f"{row.origin}: the prompt is empty; expected at least one token"))
            elif not plain and length > data.max_prompt_tokens:
                if data.on_long_prompt == "skip":
                    self.left_out.too_long += 1
                else:
                    said = (
                        f"the prompt has {length} tokens, data.max_prompt_tokens is {data.max_prompt_tokens}"
                    )
                    self._fault(
                        DataError(f"{row.origin}: {said}; raise it, or set data.on_long_prompt to skip")
                    )
            elif not plain and length < data.min_prompt_tokens:
                self.left_out.too_short += 1
            else:
                self.num_prompts += 1
                if len(self.samples) < NUM_SAMPLES:
                    self.samples.append((row, rendered.text, length))

    def _fault(self, error: DataError) -> None:
        said = re.sub(r"^.*?:\d+:? ", "", str(error), count=1)
        kind = re.split(r"[:;,] ", re.sub(r"\d+", "", said), maxsplit=1)[0]
        count, first = self.faults.get(kind, (0, str(error)))
        self.faults[kind] = (count + 1, first)
