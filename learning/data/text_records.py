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
_SPACE = re.compile(r"[ \t\n\r]*")


def form_of(path: Path) -> str:
    """Return the suffix that says the form, in small letters, whatever the compression: `.jsonl` of `a.jsonl.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def text_records(path: Path, progress: Callable[[int], None], key: str) -> Iterator[Record]:
    """Yield the records of a text file; `key` is the setting that named it.

    `progress` hears of bytes read since it heard last. Raises DataError: the file cannot be read to its end, or is
    a list or a table that is broken.
    """
    try:
        with path.open("rb") as file:
            stream = _decompressed(file, path)
            begin = stream.peek(len(_BYTE_ORDER_MARK)).removeprefix(_BYTE_ORDER_MARK).lstrip()[:1]
            if begin == b"[":
                yield from _list_items(stream, path)
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
        return _object(json.loads(line.decode("utf-8"), object_pairs_hook=_object_of), origin)
    except (ValueError, RecursionError) as error:
        return Record(origin, fault=_no_json(origin, error, _EXPECTED))


def _list_items(stream: io.BufferedReader, path: Path) -> Iterator[Record]:
    """The objects of one JSON list, by their line and their place in it; the text is whole in memory."""
    expected = "expected a list of objects, or one object a line"
    line, counted = 1, 0
    try:
        text = stream.read().decode("utf-8-sig")
        decode = json.JSONDecoder(object_pairs_hook=_object_of).raw_decode
        at = _behind_space(text, _behind_space(text, 0) + 1)
        number, has_more = 0, text[at : at + 1] != "]"
        while has_more:
            line, counted, number = line + text.count("\n", counted, at), at, number + 1
            value, end = decode(text, at)
            yield _object(value, f"{path}:{line} (item {number})")
            at = _behind_space(text, end)
            has_more = text[at : at + 1] == ","
            at = _behind_space(text, at + 1) if has_more else at
        if text[at : at + 1] != "]":
            raise json.JSONDecodeError("expected ',' or the list's ']'", text, at)
        if text[at + 1 :].strip():
            raise json.JSONDecodeError("more follows after the list", text, _behind_space(text, at + 1))
    except json.JSONDecodeError as error:
        raise _no_json(f"{path}:{error.lineno}", error, expected) from error
    except UnicodeDecodeError as error:
        raise _not_utf8(str(path), error) from error
    except (ValueError, RecursionError) as error:
        raise _no_json(f"{path}:{line}", error, expected) from error


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _object(value: Any, origin: str) -> Record:
    if not isinstance(value, dict):
        got = type(value).__name__
        return Record(origin, fault=DataError(f"{origin} must be a JSON object, got {got}"))
    return Record(origin, value)


class _DoubledKeyError(ValueError):
    """An object that has a key twice, of which a reader would drop one."""


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        doubled = next(name for name in names if names.count(name) > 1)
        raise _DoubledKeyError(f"an object has the key '{doubled[:60]}' twice; rename or drop one")
    return made


def _no_json(origin: str, error: ValueError | RecursionError, expected: str) -> DataError:
    if isinstance(error, UnicodeDecodeError):
        return _not_utf8(origin, error)
    if isinstance(error, _DoubledKeyError):
        return DataError(f"{origin}: {error}")
    if isinstance(error, json.JSONDecodeError):
        fault = f"is not valid JSON: {error.msg} at column {error.colno}"
    elif isinstance(error, RecursionError):
        fault = "cannot be read: its brackets are nested too deep"
    else:
        fault = f"cannot be read: an integer has more than {sys.get_int_max_str_digits()} digits"
    return DataError(f"{origin} {fault}; {expected}")


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
