"""Records of text files, one after the other: JSON lines, a list of JSON objects, CSV and TSV; compressed or not.

A line that is no record is handed on as a fault, so that a reader may go on; what ends a file is raised.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...core.errors import DataError
from .record import Record

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_EXPECTED = "expected one JSON object a line"
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_MAX_FIELD_CHARS = 2**31 - 1


def form_of(path: Path) -> str:
    """Return the suffix that says the form, in small letters, whatever the compression: `.jsonl` of `a.jsonl.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def text_records(path: Path, progress: Callable[[int], None], key: str) -> Iterator[Record]:
    """Yield the records of a text file; `key` is the setting that named it.

    `told` hears of bytes read since it heard last. Raises DataError: the file cannot be read to its end, or is
    a list or a table that is broken.
    """
    try:
        with path.open("rb") as file:
            stream = _decompressed(file, path)
            begin = stream.peek(len(_BYTE_ORDER_MARK)).removeprefix(_BYTE_ORDER_MARK).lstrip()[:1]
            if begin == b"[":
                yield from _items(stream, path)
                return
            lines = _lines(file, stream, progress)
            delimiter = _DELIMITERS.get(form_of(path))
            yield from _json_lines(lines, path) if delimiter is None else _table_rows(lines, path, delimiter)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; check {key}") from error


def looks_like_rows(path: Path) -> bool:
    """True for a .json file of rows, false for one that describes other files: one object, or none."""
    try:
        with path.open("rb") as file:
            lines = (line for line in _decompressed(file, path) if line.strip())
            first, second = next(lines, b""), next(lines, b"")
    except OSError:
        return True  # reading it says why
    if first.removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] == b"[":
        return True
    return bool(second) and _json_record(first.removeprefix(_BYTE_ORDER_MARK), "").fault is None


def _decompressed(file: io.BufferedReader, path: Path) -> io.BufferedReader:
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        return file
    return io.BufferedReader(pa.CompressedInputStream(file, compression))  # pyright: ignore[reportArgumentType]


def _lines(
    file: io.BufferedReader, stream: io.BufferedReader, progress: Callable[[int], None]
) -> Iterator[bytes]:
    """Lines without a byte order mark before them."""
    before = 0
    for number, line in enumerate(stream):
        after = file.tell()
        progress(after - before)
        before = after
        yield line.removeprefix(_BYTE_ORDER_MARK) if number == 0 else line


def _json_lines(lines: Iterator[bytes], path: Path) -> Iterator[Record]:
    # blank lines are passed over
    doubted: Record | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _json_record(line, f"{path}:{number}")
        if doubted is not None:
            if record.fault is not None:
                raise DataError(
                    f"{path} begins with JSON of several lines; {_EXPECTED}, or one list of objects; write the rows "
                    'so (of an object such as {"data": [...]} the list alone)'
                )
            yield doubted
            doubted = None
        elif record.fault is not None and number == 1 and line.strip()[-1:] in (b"{", b"[", b","):
            doubted = record
            continue
        yield record
    if doubted is not None:
        yield doubted


def _json_record(line: bytes, origin: str) -> Record:
    try:
        record = json.loads(line.decode("utf-8"), object_pairs_hook=object_of)
    except DoubledKey as error:
        return Record(origin, fault=DataError(f"{origin}: {error}"))
    except UnicodeDecodeError as error:
        return Record(origin, fault=_not_utf8(origin, error))
    except json.JSONDecodeError as error:
        return Record(
            origin,
            fault=DataError(f"{origin} is not valid JSON: {error.msg} at column {error.colno}; {_EXPECTED}"),
        )
    except RecursionError:
        return Record(
            origin, fault=DataError(f"{origin} cannot be read: its brackets are nested too deep; {_EXPECTED}")
        )
    except ValueError:
        digits = sys.get_int_max_str_digits()
        return Record(
            origin,
            fault=DataError(
                f"{origin} cannot be read: an integer has more than {digits} digits; {_EXPECTED}"
            ),
        )
    return _object(record, origin)


def _items(stream: io.BufferedReader, path: Path) -> Iterator[Record]:
    try:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig")
        for number, (line, value) in enumerate(list_items(text.read), start=1):
            yield _object(value, f"{path}:{line} (item {number})")
    except UnicodeDecodeError as error:
        raise _not_utf8(str(path), error) from error
    except BrokenList as error:
        raise DataError(
            f"{path}:{error.line} is not valid JSON: {error}; expected a list of objects, or one object a line"
        ) from error


def _object(value: Any, origin: str) -> Record:
    if not isinstance(value, dict):
        got = type(value).__name__
        return Record(origin, fault=DataError(f"{origin} must be a JSON object, got {got}"))
    return Record(origin, value)


def _table_rows(lines: Iterator[bytes], path: Path, delimiter: str) -> Iterator[Record]:
    """Every value is text as it stands: `007` stays so, and what is empty is the empty text."""
    csv.field_size_limit(_MAX_FIELD_CHARS)
    reader = csv.reader(_decoded(lines, path), delimiter=delimiter, strict=True)
    origin = f"{path}:1"
    try:
        names = next(reader, [])
        for name in names:
            if names.count(name) > 1:
                raise DataError(f"{path} has two columns '{name}'; rename or drop one")
        while True:
            origin = f"{path}:{reader.line_num + 1}"
            row = next(reader, None)
            if row is None:
                return
            if not row:
                continue
            if len(row) != len(names):
                got = f"{origin} has {len(row)} columns, the first line names {len(names)}"
                yield Record(
                    origin, fault=DataError(f"{got}; put quotes around values that hold '{delimiter}'")
                )
            else:
                yield Record(origin, dict(zip(names, row, strict=True)))
    except csv.Error as error:
        kind = "CSV" if delimiter == "," else "TSV"
        raise DataError(f"{origin} is not valid {kind}: {error}; fix its quotes, or write it anew") from error


def _decoded(lines: Iterator[bytes], path: Path) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _not_utf8(f"{path}:{number}", error) from error


def _not_utf8(origin: str, error: UnicodeDecodeError) -> DataError:
    return DataError(f"{origin} is not UTF-8 text: {error}; save it as UTF-8")


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
