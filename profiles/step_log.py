"""A step log on disk: what every decode step saw, decided and did, so that its decisions can be replayed.

Parquet, one row a decode step, lossless: the nested columns `state`, `budget` and `draft` are the records of that
name (`core.records`), `draft` is null where no refined draft was made. Scores are float32, seconds float64.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from core.errors import DataError
from core.records import Budget, DecodeState, DraftLog, StepRecord

VERSION = b"2"
_VERSION_KEY = b"step_log_version"
_PLAIN = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "str": pa.string()}
_DRAFT = pa.struct(
    {
        "scores": pa.list_(pa.float32()),
        "level_sizes": pa.list_(pa.int64()),
        "num_nodes": pa.list_(pa.int64()),
        "num_accepted": pa.list_(pa.int64()),
    }
)


def write_step_log(path: Path, records: Iterable[StepRecord]) -> None:
    """Write records in order; the file appears when it is whole.

    Raises DataError when a draft's scores are not float32: they would not come back as they were.
    """
    table = pa.Table.from_pylist([_row(record) for record in records], schema=_SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    pq.write_table(table, part)
    os.replace(part, path)


def read_step_log(path: Path) -> list[StepRecord]:
    """Read records in order. Raises DataError when there is no step log of this version, or it is damaged."""
    try:
        table = pq.read_table(path)
        version = (table.schema.metadata or {}).get(_VERSION_KEY)
        if version != VERSION:
            raise ValueError(f"its version is {version}, expected {VERSION}")
        return [_record(row) for row in table.to_pylist()]
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a step log this version can read: {error}") from error


def _row(record: StepRecord) -> dict[str, Any]:
    row = _plain(record) | {"state": _plain(record.state), "budget": _plain(record.budget)}
    draft = record.draft
    if draft is not None:
        if draft.scores.dtype != np.float32:
            raise DataError(
                f"scores of decode step {record.decode_step} are {draft.scores.dtype}, expected float32"
            )
        row["draft"] = _plain(draft) | {"scores": draft.scores.ravel()}
    return row


def _plain(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _record(row: dict[str, Any]) -> StepRecord:
    draft = row["draft"]
    return StepRecord(
        **row
        | {
            "state": DecodeState(**row["state"]),
            "budget": Budget(**row["budget"]),
            "draft": None if draft is None else _draft(draft),
        }
    )


def _draft(row: dict[str, Any]) -> DraftLog:
    level_sizes = tuple(row["level_sizes"])
    shape = (len(row["num_nodes"]), sum(level_sizes))
    return DraftLog(
        scores=np.asarray(row["scores"], dtype=np.float32).reshape(shape),
        level_sizes=level_sizes,
        num_nodes=np.asarray(row["num_nodes"], dtype=np.int64),
        num_accepted=np.asarray(row["num_accepted"], dtype=np.int64),
    )


def _struct(record: type) -> pa.StructType:
    # annotations are strings in `core.records`
    return pa.struct({field.name: _PLAIN[str(field.type)] for field in fields(record)})


_NESTED = {"state": _struct(DecodeState), "budget": _struct(Budget), "draft": _DRAFT}
_SCHEMA = pa.schema(
    {field.name: _NESTED.get(field.name) or _PLAIN[str(field.type)] for field in fields(StepRecord)},
    metadata={_VERSION_KEY: VERSION},
)
