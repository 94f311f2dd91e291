"""Values of a JSON list, one after the other: the list is never whole in memory."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_CHARS_AT_ONCE = 1 << 18
_LONGEST_WORD = 16
"What text that was cut off may end within, such as `-Infinity` or an escape, has fewer characters."


class BrokenList(ValueError):
    """Text that is no JSON list; `line` says where."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


class DoubledKey(Exception):
    """An object that has a key twice, of which a reader would drop one."""


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, for `json`. Raises DoubledKey."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        doubled = next(name for name in names if names.count(name) > 1)
        raise DoubledKey(f"an object has the key '{doubled[:60]}' twice; rename or drop one")
    return made


def list_items(read: Callable[[int], str]) -> Iterator[tuple[int, Any]]:
    """Yield each value with the line that it begins in, counted from 1.

    `read` gives at most so many more characters, none at the end. Raises BrokenList: no list, a broken one, or more
    text behind it.
    """
    reader = _Reader(read)
    reader.take("[")
    if reader.peek() != "]":
        yield reader.value()
        while reader.peek() == ",":
            reader.take(",")
            yield reader.value()
    reader.take("]")
    if reader.peek():
        raise BrokenList("more follows after the list", reader.line)


class _Reader:
    def __init__(self, read: Callable[[int], str]) -> None:
        self.line = 1
        self._read = read
        self._held = ""
        self._at = 0
        self._ended = False
        self._decoder = json.JSONDecoder(object_pairs_hook=object_of)

    def peek(self) -> str:
        """The next character that is no white space, empty at the end."""
        while True:
            match = _SPACE.match(self._held, self._at)
            self._move(match.end() if match else self._at)
            if self._at < len(self._held) or not self._more():
                return self._held[self._at : self._at + 1]

    def take(self, expected: str) -> None:
        """Pass over a character."""
        if self.peek() != expected:
            raise BrokenList(f"expected '{expected}', got {self.peek() or 'the end'!r}", self.line)
        self._move(self._at + 1)

    def value(self) -> tuple[int, Any]:
        """The value that begins here, and its line."""
        self.peek()
        line = self.line
        while True:
            try:
                value, end = self._decoder.raw_decode(self._held, self._at)
            except json.JSONDecodeError as error:
                if self._may_be_cut(error) and self._more():
                    continue
                into = self._held.count("\n", self._at, error.pos)
                raise BrokenList(error.msg, line + into) from error
            except DoubledKey as error:
                raise BrokenList(str(error), line) from error
            except RecursionError as error:
                raise BrokenList("brackets are nested too deep", line) from error
            except ValueError as error:
                raise BrokenList(
                    f"an integer has more than {sys.get_int_max_str_digits()} digits", line
                ) from error
            if (
                not isinstance(value, dict | list | str)
                and end > len(self._held) - _LONGEST_WORD
                and self._more()
            ):
                continue  # a number may go on, as 1 does before .5
            self._move(end)
            return line, value

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        return error.pos > len(self._held) - _LONGEST_WORD or error.msg.startswith("Unterminated string")

    def _move(self, end: int) -> None:
        self.line += self._held.count("\n", self._at, end)
        self._at = end

    def _more(self) -> bool:
        """Hold more text, twice as much each time that one value needs more. False at the end."""
        if self._ended:
            return False
        rest = self._held[self._at :]
        read = self._read(max(_CHARS_AT_ONCE, len(rest)))
        self._ended = not read
        if read:
            self._held, self._at = rest + read, 0
        return bool(read)
