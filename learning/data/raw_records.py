"""Reads the records of files, folders and `datasets` one after the other; no file is ever whole in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...core.errors import DataError
from ...core.outside import is_file
from ...core.surfaces.surface import note_once
from . import verifiers_package
from .chat.messages import ROLE_KEYS
from .data_files import NAMED_FORMATS, find_files, is_saved_by_datasets, split_subset
from .record import Record, has_field
from .text_records import form_of, text_records

_EXACT = 2**53
ROWS_AT_ONCE = 1024
"Rows of a Parquet file that are Python objects at the same time."

Choose = Callable[[Mapping[str, bool], str], list[str] | None]
"Given every column and whether it holds conversations, and where: the columns to read; None for all."


@dataclass(slots=True)
class ReadProgress:
    """How far reading has come: bytes of text files, rows of Parquet and `datasets`."""

    done: int = 0
    total: int = 0

    @property
    def fraction(self) -> float:
        """From 0 to 1."""
        return min(self.done / self.total, 1.0) if self.total else 0.0

    def add(self, done: int) -> None:
        """Count so much more."""
        self.done += done


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
) -> Iterator[Record]:
    """Yield the records of a file, a pattern, a folder or a data set; `key` is the setting that named it.

    Raises DataError: missing or unreadable file, damaged Parquet, no such data set; and what `choose` raises.
    """
    is_whole = cache(lambda name: _holds_whole_numbers(path, split, name, key))
    for record in _records(path, split, choose, progress or ReadProgress(), key):
        may_be_float = any(isinstance(value, float | dict) for value in record.values.values())
        yield replace(record, is_whole=is_whole) if may_be_float else record


def _holds_whole_numbers(path: str, split: str, name: str, key: str) -> bool:
    """Whether a column, or a path into one, holds whole numbers that a data frame with gaps made floats of."""
    for record in _records(path, split, all_columns, ReadProgress(), key):
        value = record.find(name, key) if has_field(record.values, name) else None
        is_gap = value is None or value != value
        if not is_gap and not (isinstance(value, float) and value.is_integer() and abs(value) < _EXACT):
            return False
    note_once(
        f"{path}: '{name}' holds whole numbers that are written as floats, as of a data frame with gaps; they are read "
        "as whole numbers (18.0 as 18)"
    )
    return True


def _records(path: str, split: str, choose: Choose, progress: ReadProgress, key: str) -> Iterator[Record]:
    files = find_files(path, split, key=key)
    if files is None:
        yield from _hub(path, split, choose, progress, key)
        return
    is_parquet = form_of(files[0]) == ".parquet"
    progress.total = 0 if is_parquet else sum(file.stat().st_size for file in files if is_file(file))
    for index, file in enumerate(files):
        if is_parquet:
            yield from _parquet(file, choose, progress, len(files) - index, key)
        else:
            yield from text_records(file, progress.add, key)


def _parquet(
    path: Path, choose: Choose, progress: ReadProgress, files_left: int, key: str
) -> Iterator[Record]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            # of files that were not opened so far, the rows are taken to be as many
            progress.total = progress.done + file.metadata.num_rows * files_left
            columns = choose(_kinds(file.schema_arrow, str(path)), str(path))
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns):
                for values in batch.to_pylist():
                    yield Record(f"{path}:row {number}", values, padded=True)
                    number += 1
                progress.done += batch.num_rows
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path} is not a readable Parquet file: after {number} rows {error}; write it anew, or check {key}"
        ) from error


def _kinds(schema: pa.Schema, origin: str) -> dict[str, bool]:
    """Every column, and whether it holds conversations. Raises DataError for two columns of one name."""
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise DataError(f"{origin} has two columns '{name}'; rename or drop one")
    return {column.name: _holds_conversations(column.type) for column in schema}


def _holds_conversations(kind: pa.DataType) -> bool:
    """Lists of objects, or what `datasets` makes of a Sequence of them: an object of lists."""
    if pa.types.is_struct(kind):
        return any(
            kind[place].name in ROLE_KEYS and _is_list(kind[place].type) for place in range(kind.num_fields)
        )
    return _is_list(kind) and pa.types.is_struct(kind.value_type)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _hub(name: str, split: str, choose: Choose, progress: ReadProgress, key: str) -> Iterator[Record]:
    from datasets.exceptions import DatasetsError  # some seconds to import, and only this branch needs it

    try:
        table = _table(name, split, key)
        progress.total = len(table)
        columns = choose(_kinds(table.features.arrow_schema, name), name)
        if columns is not None:
            table = table.select_columns(columns)
        for index, values in enumerate(table):
            progress.done += 1
            yield Record(f"{name}:row {index}", dict(values), padded=True)
    except (DatasetsError, pa.ArrowException, OSError, ValueError, RuntimeError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise DataError(
            f"cannot load the data set '{name}' (split {split}): {error}{cause}; "
            f"expected a file or folder of {NAMED_FORMATS}, or the name of a `datasets` data set in {key}"
        ) from error


def _table(name: str, split: str, key: str) -> Any:
    """The `datasets.Dataset` of a split, loaded by its name or from where `save_to_disk` wrote it."""
    if name.startswith(verifiers_package.SCHEME):
        return verifiers_package.table(name, split, key)
    import datasets

    path, subset = split_subset(name)
    if not path:
        raise DataError(f"{key} '{name}' names no data set; expected a file, or NAME or NAME:SUBSET")
    if not is_saved_by_datasets(Path(path)):
        return datasets.load_dataset(path, subset or None, split=split)
    saved = datasets.load_from_disk(path)
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise DataError(
                f"{path} has no split '{split}'; it has {', '.join(map(str, saved))}; check data.split"
            )
        return saved[split]
    of = str(saved.split).split("[")[0] if saved.split else split
    if split not in (of, Path(path).name):
        raise DataError(
            f"{path} was saved from split '{of}', expected '{split}'; set data.split to {of} if that is meant"
        )
    return saved
