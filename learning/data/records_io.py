"""Reads rows of prompt and reference from JSONL, Parquet or a `datasets` name."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from core.config import DataConfig
from core.errors import DataError
from core.outside import cut, is_dir, is_file

FORMATS = (".jsonl", ".json", ".parquet")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record; `origin` names file and line for error messages."""

    prompt: str
    reference: str
    origin: str


def read_rows(data: DataConfig) -> list[Row]:
    """Read the rows of `data.path`, at most `data.limit`.

    Raises DataError: missing file, malformed JSON (file and line), missing or non-text field, no row.
    """
    path = data.path
    if path is None:
        raise DataError("data.path is not set; expected a .jsonl or .parquet file, or a data set's name")
    rows: list[Row] = []
    for origin, record in _records(data, path):
        if data.limit is not None and len(rows) >= data.limit:
            break
        rows.append(_row(record, data, origin))
    if not rows:
        raise DataError(f"{path} is empty: expected at least one record, got none; check data.path")
    return rows


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file:line, record). Blank lines and a byte order mark are passed over.

    Raises DataError for a malformed line, or a file that cannot be read.
    """
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        origin = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{origin} is not valid JSON: {error.msg} at column {error.colno}; "
                "expected one JSON object a line"
            ) from error
        except (ValueError, RecursionError) as error:
            fault = (
                "its brackets are nested too deep"
                if isinstance(error, RecursionError)
                else (f"an integer has more than {sys.get_int_max_str_digits()} digits")
            )
            raise DataError(f"{origin} cannot be read: {fault}; expected one JSON object a line") from None
        if not isinstance(record, dict):
            raise DataError(f"{origin} must be a JSON object, got {type(record).__name__}")
        yield origin, record


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig", errors="strict") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; save it as UTF-8") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check data.path") from error


def _records(data: DataConfig, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    file = Path(path).expanduser()
    if file.suffix.lower() not in FORMATS:
        if is_file(file):
            raise DataError(
                f"cannot read {file}: expected a file of JSON lines (.jsonl, .json) or Parquet (.parquet), got "
                f"{file.suffix or 'no suffix'}; convert it, one object a row with the fields data.prompt_field "
                "and data.reference_field name"
            )
        if not is_dir(file) and path.startswith(("/", ".", "~")):
            raise DataError(f"data file {file} does not exist; check data.path")
        return _hub(path, data)
    if not is_file(file):
        raise DataError(f"data file {file} does not exist; check data.path")
    return _parquet(file, data) if file.suffix.lower() == ".parquet" else read_jsonl(file)


def _parquet(path: Path, data: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file:row, record) with the columns that are used."""
    number = 0
    try:
        file = pq.ParquetFile(path)
        columns = _columns(data, file.schema_arrow.names, str(path))
        for batch in file.iter_batches(columns=columns):
            for record in batch.to_pylist():
                yield f"{path}:row {number}", record
                number += 1
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path} is not a readable Parquet file: after {number} rows {error}; write it anew, or check data.path"
        ) from error


def _hub(name: str, data: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets  # a second to import, and only this branch needs it
    from datasets.exceptions import DatasetsError

    path, _, subset = name.partition(":")
    if not path:
        raise DataError(f"data.path '{name}' names no data set; expected a file, or NAME or NAME:SUBSET")
    try:
        table = datasets.load_dataset(path, subset or None, split=data.split)
        table = table.select_columns(_columns(data, table.column_names, name))
        for index, record in enumerate(table):
            yield f"{name}:row {index}", dict(record)
    except (DatasetsError, pa.ArrowException, OSError, ValueError, RuntimeError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise DataError(
            f"cannot load the data set '{name}' (split {data.split}): {error}{cause}; "
            "expected a .jsonl or .parquet file, or the name of a `datasets` data set"
        ) from error


def _columns(data: DataConfig, names: Sequence[str], origin: str) -> list[str]:
    """The fields that are used, which must be among `names`."""
    wanted = {"data.prompt_field": data.prompt_field, "data.reference_field": data.reference_field}
    for key, name in wanted.items():
        if name is not None and name not in names:
            raise DataError(f"{origin} has no field '{name}' ({key}); its fields are {cut(', '.join(names))}")
    return [name for name in names if name in wanted.values()]


def _row(record: dict[str, Any], data: DataConfig, origin: str) -> Row:
    prompt = _field(record, data.prompt_field, origin, "data.prompt_field")
    if data.reference_field is None:
        return Row(prompt=prompt, reference="", origin=origin)
    reference = _field(record, data.reference_field, origin, "data.reference_field")
    return Row(prompt=prompt, reference=reference, origin=origin)


def _field(record: dict[str, Any], name: str, origin: str, key: str) -> str:
    if name not in record:
        raise DataError(f"{origin} has no field '{name}' ({key}); its fields are {cut(', '.join(record))}")
    value = record[name]
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    if not is_plain or (isinstance(value, float) and not math.isfinite(value)):
        raise DataError(f"{origin}: field '{name}' must be text, got {type(value).__name__}; see {key}")
    text = str(value)
    if half := _SURROGATE.search(text):
        raise DataError(
            f"{origin}: field '{name}' must be text, got half of a surrogate pair at character {half.start() + 1}; "
            "mend the escape"
        )
    return text
