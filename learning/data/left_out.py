"""What is left out of a data set and how often, and what a user should know of rows that are taken as they are."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import regex
from transformers import PreTrainedTokenizerBase

from ...core.errors import ConfigError, DataError
from ...core.named_code import describe, named_code
from ...core.outside import cut
from .chat.messages import Messages, Turn

_SPOKEN = ("user", "tool")
"Whose texts come from outside."


@dataclass(slots=True, kw_only=True)
class LeftOut:
    """Counts of prompts that were left out."""

    too_long: int = 0
    too_short: int = 0
    duplicates: int = 0
    filtered: int = 0
    notes: dict[str, None] = field(default_factory=dict)
    "of the rows that were taken: what nothing reads"

    def describe(self) -> str:
        """Such as `12 too long, 3 duplicates`; empty where nothing is left out."""
        named = {
            "too long": self.too_long,
            "too short": self.too_short,
            "duplicates": self.duplicates,
            "by data.filter": self.filtered,
        }
        return ", ".join(f"{count:,} {name}" for name, count in named.items() if count)


class Remarks:
    """Collects over all sources of a data set; `lines` says it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._notes: dict[str, None] = {}
        self._heads: dict[str, None] = {}
        self._num_marked = 0
        self._first_marked = ""
        known: Any = tokenizer
        names = {*known.all_special_tokens, *known.get_added_vocab()} if known is not None else ()
        long = [name for name in names if len(name) > 2]
        # no names at all would be found everywhere
        self._marks = regex.compile(r"\L<names>", names=long) if long else None

    def notes(self, lines: Iterable[str]) -> None:
        """Note what readers of rows and of messages have noted."""
        self._notes |= dict.fromkeys(lines)

    def heads(self, heads: Iterable[str]) -> None:
        """Note what responses must begin with themselves, as `turn_beginning` says."""
        self._heads |= dict.fromkeys(heads)

    def turns(self, turns: Sequence[Turn], origin: str) -> None:
        """Note a user's or tool's text that holds what the tokenizer reads as a token of its own."""
        for turn in turns:
            found = self._marks and turn["role"] in _SPOKEN and self._marks.search(turn["content"])
            if found:
                self._num_marked += 1
                self._first_marked = self._first_marked or f"{cut(found[0])} in {origin}"
                return

    @property
    def lines(self) -> tuple[str, ...]:
        """What was noted."""
        lines = [*self._notes]
        if self._num_marked:
            lines.append(
                f"{self._num_marked:,} rows hold text that the tokenizer reads as a token of its own, the first "
                f"{self._first_marked}; fix the rows where that is no wish"
            )
        lines += [
            f"the chat template does not begin the assistant's turn: {cut(repr(head))}, which it writes before every "
            "answer, is left to the response; let it write that where add_generation_prompt is true"
            for head in self._heads
        ]
        return tuple(lines)


class Seen:
    """Remembers prompts by 16 bytes of their hash, over all sources."""

    def __init__(self, how: str) -> None:
        self._normalizes = how == "normalized"
        self._digests: set[bytes] = set()

    def before(self, text: str, messages: Messages, more: str = "") -> bool:
        """Return whether the same prompt was asked for before; roles count, system prompts of the row too.

        `more` is what messages and tools say beside role and content.
        """
        turns = messages or (("", text),)
        if self._normalizes:
            turns = tuple((role, normalize(content)) for role, content in turns)
        digest = hashlib.blake2b((json.dumps(turns) + more).encode(), digest_size=16).digest()
        if digest in self._digests:
            return True
        self._digests.add(digest)
        return False


def normalize(text: str) -> str:
    """Fold what a reader does not see as another text: Unicode form (NFKC), case, white space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


class RowFilter:
    """The user's function of a row, `package.module:function`. Raises ConfigError where it cannot be imported."""

    def __init__(self, path: str) -> None:
        self.path = path
        function = named_code(
            path,
            key="data.filter",
            kind="function",
            example="my_data:keep for the function keep in my_data.py",
        )
        if not callable(function):
            name = path.partition(":")[2]
            raise ConfigError(f"data.filter {path}: '{name}' is {type(function).__name__}, not a function")
        self._function = function

    def keeps(self, values: dict[str, Any], origin: str) -> bool:
        """Return what the function says of a row. Raises DataError, naming the row, unless it is true or false."""
        try:
            answer = self._function(values)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise DataError(
                f"{origin}: data.filter {self.path} raised {type(error).__name__}: {describe(error)}; fix the function"
            ) from error
        if not isinstance(answer, bool | np.bool_):
            raise DataError(
                f"{origin}: data.filter {self.path} returned {type(answer).__name__}; expected true or false"
            )
        return bool(answer)
