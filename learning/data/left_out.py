"""What is left out of a data set, and how often: too long, too short, seen before, refused by the user's filter."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.errors import ConfigError, DataError
from core.named_code import describe, named_code
from learning.data.messages import Messages


@dataclass(slots=True, kw_only=True)
class LeftOut:
    """Counts of prompts that were left out."""

    too_long: int = 0
    too_short: int = 0
    duplicates: int = 0
    filtered: int = 0

    def describe(self) -> str:
        """Such as `12 too long, 3 duplicates`; empty where nothing is left out."""
        named = {
            "too long": self.too_long,
            "too short": self.too_short,
            "duplicates": self.duplicates,
            "by data.filter": self.filtered,
        }
        return ", ".join(f"{count:,} {name}" for name, count in named.items() if count)


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
                f"{origin}: data.filter {self.path} raised {type(error).__name__}: {describe(error)}; mend the function"
            ) from error
        if not isinstance(answer, bool | np.bool_):
            raise DataError(
                f"{origin}: data.filter {self.path} returned {type(answer).__name__}; expected true or false"
            )
        return bool(answer)
