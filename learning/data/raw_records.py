"""Reads records of JSONL, Parquet and `datasets` one after the other; no file is ever whole in memory.

A line that is no record is handed on as a fault, so that a reader may go on; what ends a file is raised.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from core.errors import DataError
from learning.data.data_files import find_files

ROWS_AT_ONCE = 1024
"Rows of a Parquet file that are Python objects at the same time."
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Choose = Callable[[Mapping[str, bool], str], list[str] | None]
"Given every column and whether it holds conversations, and where: the columns to read; None for all."


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record, or what is wrong with it; `origin` names file and line (or row)."""

    origin: str
    values: dict[str, Any] = field(default_factory=dict)
    fault: DataError | None = None


@dataclass(slots=True)
class ReadProgress:
    """How far reading has come: bytes of JSON lines, rows of Parquet and `datasets`."""

    done: int = 0
    total: int = 0

    @property
    def fraction(self) -> float:
        """From 0 to 1."""
        return min(self.done / self.total, 1.0) if self.total else 0.0


def all_columns(columns: Mapping[str, bool], where: str) -> list[str] | None:
    """A `Choose` that reads whole rows."""
    return None


def iter_records(
    path: str,
    split: str,
    choose: Choose = all_columns,
    progress: ReadProgress | None = None,
    *,
    key: str = "data.path",
) -> Iterator[RawRecord]:
    """Yield the records of a file, a pattern, a folder or a data set; `key` is the setting that named it.

    Raises DataError: missing or unreadable file, damaged Parquet, no such data set; and what `choose` raises.
    """
    progress = progress or ReadProgress()
    files = find_files(path, split, key=key)
    if files is None:
        yield from _hub(path, split, choose, progress, key)
        return
    is_parquet = files[0].suffix.lower() == ".parquet"
    progress.total = 0 if is_parquet else sum(_size(file) for file in files)
    for index, file in enumerate(files):
        if is_parquet:
            yield from _parquet(file, choose, progress, len(files) - index, key)
        else:
            yield from _jsonl(file, progress, key)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # opening it says why


def _jsonl(path: Path, progress: ReadProgress, key: str) -> Iterator[RawRecord]:
    # blank lines and a byte order mark are passed over
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                progress.done += len(line)
                if number == 1:
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                if line.strip():
                    yield _json_record(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check {key}") from error


def _json_record(line: bytes, origin: str) -> RawRecord:
    expected = "expected one JSON object a line"
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RawRecord(origin, fault=DataError(f"{origin} is not UTF-8 text: {error}; save it as UTF-8"))
    except json.JSONDecodeError as error:
        return RawRecord(
            origin,
            fault=DataError(f"{origin} is not valid JSON: {error.msg} at column {error.colno}; {expected}"),
        )
    except RecursionError:
        return RawRecord(
            origin, fault=DataError(f"{origin} cannot be read: its brackets are nested too deep; {expected}")
        )
    except ValueError:
        digits = sys.get_int_max_str_digits()
        return RawRecord(
            origin,
            fault=DataError(f"{origin} cannot be read: an integer has more than {digits} digits; {expected}"),
        )
    if not isinstance(record, dict):
        got = type(record).__name__
        return RawRecord(origin, fault=DataError(f"{origin} must be a JSON object, got {got}"))
    return RawRecord(origin, record)


def _parquet(
    path: Path, choose: Choose, progress: ReadProgress, files_left: int, key: str
) -> Iterator[RawRecord]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            # of files that were not opened so far, the rows are taken to be as many
            progress.total = progress.done + file.metadata.num_rows * files_left
            columns = choose(_kinds(file.schema_arrow, str(path)), str(path))
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns):
                for values in batch.to_pylist():
                    yield RawRecord(f"{path}:row {number}", values)
                    number += 1
                progress.done += batch.num_rows
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path} is not a readable Parquet file: after {number} rows {error}; write it anew, or check {key}"
        ) from error


def _kinds(schema: pa.Schema, origin: str) -> dict[str, bool]:
    """Every column, and whether it holds lists of objects. Raises DataError for two columns of one name."""
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise DataError(f"{origin} has two columns '{name}'; rename or drop one")
    return {column.name: _is_list_of_structs(column.type) for column in schema}


def _is_list_of_structs(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and pa.types.is_struct(kind.value_type)


def _hub(name: str, split: str, choose: Choose, progress: ReadProgress, key: str) -> Iterator[RawRecord]:
    import datasets  # a second to import, and only this branch needs it
    from datasets.exceptions import DatasetsError

    path, _, subset = name.partition(":")
    if not path:
        raise DataError(f"{key} '{name}' names no data set; expected a file, or NAME or NAME:SUBSET")
    try:
        table = datasets.load_dataset(path, subset or None, split=split)
        progress.total = len(table)
        columns = choose(_kinds(table.features.arrow_schema, name), name)
        if columns is not None:
            table = table.select_columns(columns)
        for index, values in enumerate(table):
            progress.done += 1
            yield RawRecord(f"{name}:row {index}", dict(values))
    except (DatasetsError, pa.ArrowException, OSError, ValueError, RuntimeError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise DataError(
            f"cannot load the data set '{name}' (split {split}): {error}{cause}; "
            f"expected a .jsonl or .parquet file, or the name of a `datasets` data set in {key}"
        ) from error
