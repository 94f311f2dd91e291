"""Reads rows of prompt and reference from JSONL, Parquet or a `datasets` name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from core.config import DataConfig
from core.errors import DataError


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
    for origin, record in _records(path, data.split):
        if data.limit is not None and len(rows) >= data.limit:
            break
        rows.append(_row(record, data, origin))
    if not rows:
        raise DataError(f"{path} is empty: expected at least one record, got none; check data.path")
    return rows


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file:line, record). Blank lines are passed over. Raises DataError for a malformed line."""
    with path.open(encoding="utf-8", errors="strict") as file:
        for number, line in enumerate(_lines(file, path), start=1):
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
            if not isinstance(record, dict):
                raise DataError(f"{origin} must be a JSON object, got {type(record).__name__}")
            yield origin, record


def _lines(file: Any, path: Path) -> Iterator[str]:
    try:
        yield from file
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; save it as UTF-8") from error


def _records(path: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    file = Path(path).expanduser()
    if file.suffix in (".jsonl", ".json", ".parquet"):
        if not file.is_file():
            raise DataError(f"data file {file} does not exist; check data.path")
        return _parquet(file) if file.suffix == ".parquet" else read_jsonl(file)
    return _hub(path, split)


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error
    number = 0
    for batch in file.iter_batches():
        for record in batch.to_pylist():
            yield f"{path}:row {number}", record
            number += 1


def _hub(name: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets  # a second to import, and only this branch needs it

    path, _, subset = name.partition(":")
    try:
        data = datasets.load_dataset(path, subset or None, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"cannot load the data set '{name}' (split {split}): {error}; "
            "expected a .jsonl or .parquet file, or the name of a `datasets` data set"
        ) from error
    return ((f"{name}:row {index}", dict(record)) for index, record in enumerate(data))


def _row(record: dict[str, Any], data: DataConfig, origin: str) -> Row:
    prompt = _field(record, data.prompt_field, origin, "data.prompt_field")
    if data.reference_field is None:
        return Row(prompt=prompt, reference="", origin=origin)
    reference = _field(record, data.reference_field, origin, "data.reference_field")
    return Row(prompt=prompt, reference=reference, origin=origin)


def _field(record: dict[str, Any], name: str, origin: str, key: str) -> str:
    if name not in record:
        raise DataError(f"{origin} has no field '{name}' ({key}); its fields are {', '.join(record)}")
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{origin}: field '{name}' must be text, got {type(value).__name__}; see {key}")
    return str(value)
