"""What a data set holds, as the model would see it: counts, lengths, faults by kind, samples."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

from ...core.config import DataConfig
from ...core.errors import DataError
from .prompt_rows import Row
from .prompts import PromptReader

NUM_SAMPLES = 3


class DataReport(PromptReader):
    """What `rlhfspec data check` says. Counts are of rows read; a row that is no prompt is a fault."""

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase | None, *, seed: int) -> None:
        """Read everything that `data` describes and go on after faults.

        Without a tokenizer lengths are in characters, conversations are shown as their turns, and nothing is too long.
        Raises ConfigError for `data.filter`, DataError for a template that cannot be read.
        """
        super().__init__(data, tokenizer, seed=seed)
        self.name = " + ".join(source.name for source in data.each_source())
        self.unit = "characters" if tokenizer is None else "tokens"
        self.num_prompts = 0
        self.samples: list[tuple[Row, str, int]] = []
        "with text and length as the model sees it"
        self.faults: dict[str, tuple[int, str]] = {}
        "how many and the first, by kind: what a message says behind its row, without numbers"
        for source in data.each_source():
            for row, rendered, tokens in self.read(source):
                self.num_prompts += 1
                if len(self.samples) < NUM_SAMPLES:
                    self.samples.append((row, rendered.text, len(tokens)))
        self.num_rows += self.left_out.filtered
        self.num_faults = sum(count for count, _ in self.faults.values())

    def fault(self, error: DataError) -> None:
        """Count it."""
        said = re.sub(r"^.*?:\d+:? ", "", str(error), count=1)
        kind = re.split(r"[:;,] ", re.sub(r"\d+", "", said), maxsplit=1)[0]
        count, first = self.faults.get(kind, (0, str(error)))
        self.faults[kind] = (count + 1, first)
