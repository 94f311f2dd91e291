"""Response lengths from files: rollouts of a run, or plain numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from rlhfspec.core.errors import DataError

TOKEN_COLUMN = "response_token_ids"
LENGTH_COLUMN = "response_tokens"


def read_lengths(path: Path) -> np.ndarray:
    """[n] lengths in the file's order.

    Parquet: a run's rollouts file (token arrays in `response_token_ids`), or numbers in `response_tokens`.
    JSONL: a number a line, or objects with one of these fields.

    Raises DataError when the file is missing or holds something else.
    """
    if not path.is_file():
        raise DataError(
            f"no file of lengths at {path}; expected a preset, or a .parquet or .jsonl file of responses"
        )
    lengths = _parquet_lengths(path) if path.suffix == ".parquet" else _jsonl_lengths(path)
    if not len(lengths) or int(lengths.min()) < 1:
        raise DataError(f"{path} holds no lengths, or some below 1; expected one positive number a response")
    return lengths


def _parquet_lengths(path: Path) -> np.ndarray:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
        if TOKEN_COLUMN in names:
            chunks = pq.read_table(path, columns=[TOKEN_COLUMN])[TOKEN_COLUMN].chunks
            return np.concatenate(
                [np.zeros(0, dtype=np.int64), *(np.asarray(c.value_lengths()) for c in chunks)]
            )
        if LENGTH_COLUMN not in names:
            raise DataError(
                f"{path} has the columns {', '.join(names)}; expected {TOKEN_COLUMN} (token arrays, as in a "
                f"run's rollouts) or {LENGTH_COLUMN} (numbers)"
            )
        return np.asarray(pq.read_table(path, columns=[LENGTH_COLUMN])[LENGTH_COLUMN], dtype=np.int64)
    except (pa.ArrowException, AttributeError, ValueError, TypeError, OSError) as error:
        raise DataError(f"{path} cannot be read as lengths: {error}; expected a Parquet file") from error


def _jsonl_lengths(path: Path) -> np.ndarray:
    lengths = []
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as lengths: {error}; expected JSON lines") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            lengths.append(_length(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path}, line {number} is no length: {error}; expected a whole number, or an object with "
                f"{LENGTH_COLUMN} or {TOKEN_COLUMN}"
            ) from error
    return np.array(lengths, dtype=np.int64)


def _length(row: Any) -> int:
    if isinstance(row, dict):
        if TOKEN_COLUMN in row and not isinstance(row[TOKEN_COLUMN], list):
            raise ValueError(f"{TOKEN_COLUMN} is no list")
        row = len(row[TOKEN_COLUMN]) if TOKEN_COLUMN in row else row[LENGTH_COLUMN]
    if isinstance(row, bool) or not isinstance(row, int) or row >= 2**31:
        raise ValueError(f"got {row!r}")
    return row
