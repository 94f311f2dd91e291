"""Reads a run's rollout files back: which samples there are, and some of them whole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlhfspec.core.errors import DataError
from rlhfspec.core.records import (
    Completion,
    FinishReason,
    Prompt,
    Reward,
    Rollout,
    SampleKey,
    Stream,
    WeightSpan,
)

_INDEX = ("run_seed", "stream", "sample_index", "weight_version")
_UNREADABLE = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError, AttributeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a sample stands, and what decides whether it can be generated again."""

    file: Path
    row: int
    iteration: int
    key: SampleKey
    weight_versions: tuple[int, ...]
    "of its tokens, in their order"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A sample as its file has it. Its prompt has neither messages nor fields: files do not keep them."""

    place: Place
    rollout: Rollout
    advantage: float | None


def rollout_files(run: Path) -> list[Path]:
    """The rollout files of a run, by iteration."""
    return sorted((run / "rollouts").glob("iteration_*.parquet"), key=_iteration)


def places_in(file: Path) -> list[Place]:
    """Every sample of a rollout file. Raises DataError: it cannot be read."""
    try:
        rows = _table(file, [*_INDEX, "span_versions"]).to_pylist()
        return [
            Place(
                file=file,
                row=row,
                iteration=_iteration(file),
                key=SampleKey(
                    run_seed=one["run_seed"], stream=Stream(one["stream"]), sample_index=one["sample_index"]
                ),
                weight_versions=tuple(one.get("span_versions") or (int(one["weight_version"]),)),
            )
            for row, one in enumerate(rows)
        ]
    except _UNREADABLE as error:
        raise _unreadable(file, error) from error


def read_recorded(places: Sequence[Place]) -> list[Recorded]:
    """Read samples of one file whole. Raises DataError: it cannot be read."""
    file = places[0].file
    try:
        table = _table(file)
        arrays = {
            name: _lists(table, name) for name in _ARRAYS if name in table.column_names or name not in _SPANS
        }
        plain = [name for name in table.column_names if name not in arrays]
        rows = table.select(plain).to_pylist()
        return [
            _recorded(place, rows[place.row], {name: lists[place.row] for name, lists in arrays.items()})
            for place in places
        ]
    except _UNREADABLE as error:
        raise _unreadable(file, error) from error


def _table(file: Path, columns: list[str] | None = None) -> pa.Table:
    # read_table would import pyarrow's data sets first, which takes longer than most files
    with pq.ParquetFile(file) as opened:
        # files of older versions have no spans
        there = opened.schema_arrow.names
        return opened.read(columns and [name for name in columns if name in there or name not in _SPANS])


_ARRAYS = {
    "prompt_token_ids": (pa.int32(), np.int32),
    "response_token_ids": (pa.int32(), np.int32),
    "policy_logprobs": (pa.float32(), np.float32),
    "sampling_logprobs": (pa.float32(), np.float32),
    "response_sampled": (pa.bool_(), np.bool_),
    "span_versions": (pa.int32(), np.int32),
    "span_positions": (pa.int32(), np.int32),
    "span_keeps_caches": (pa.bool_(), np.bool_),
}
_SPANS = ("span_versions", "span_positions", "span_keeps_caches")
"Files of versions before these have none; the last is in those of schema 3 alone."


def _lists(table: pa.Table, name: str) -> list[np.ndarray | None]:
    """A column of lists, as slices of one array; null lists are None, whole numbers int64."""
    kind, dtype = _ARRAYS[name]
    column = table.column(name).combine_chunks()
    if column.type != pa.list_(kind):
        raise ValueError(f"{name} is {column.type}, expected {pa.list_(kind)}")
    if column.null_count == len(column):
        return [None] * len(column)
    offsets = _numbers(column.offsets, np.int32).tolist()
    values = (
        np.array(column.values.to_pylist(), dtype=bool)
        if dtype is np.bool_
        else _numbers(column.values, dtype)
    )
    values = values.astype(np.int64) if dtype is np.int32 else values
    valid = column.is_valid().to_pylist()
    return [
        values[start:stop] if there else None
        for there, start, stop in zip(valid, offsets[:-1], offsets[1:], strict=True)
    ]


def _numbers(array: pa.Array, dtype: Any) -> np.ndarray:
    """The numbers of an Arrow array; its own `to_numpy` would import pandas first."""
    if array.null_count:
        raise ValueError(f"{array.null_count} numbers are missing")
    held = np.frombuffer(array.buffers()[1], dtype=dtype, count=array.offset + len(array))
    return held[array.offset :]


def _recorded(place: Place, row: dict[str, Any], arrays: dict[str, np.ndarray | None]) -> Recorded:
    lists = {name: array for name, array in arrays.items() if array is not None}
    sampled = lists.get("response_sampled")
    if sampled is not None and len(sampled) != len(lists["response_token_ids"]):
        raise ValueError(f"row {place.row} has {len(sampled)} marks in response_sampled for its tokens")
    completion = Completion(
        key=place.key,
        prompt_id=row["prompt_id"],
        group_id=row["group_id"],
        epoch=row["epoch"],
        token_ids=lists["response_token_ids"],
        policy_logprobs=lists["policy_logprobs"],
        sampling_logprobs=lists["sampling_logprobs"],
        finish_reason=FinishReason(row["finish_reason"]),
        weight_spans=_weight_spans(place, lists),
        instance=row["instance"],
        num_decode_steps=row["num_decode_steps"],
        num_accepted_tokens=row["num_accepted_tokens"],
        sampled=sampled,
    )
    prompt = Prompt(
        prompt_id=row["prompt_id"],
        token_ids=lists["prompt_token_ids"],
        text=row["prompt"],
        reference=row["reference"],
    )
    rollout = Rollout(
        prompt=prompt,
        completion=completion,
        response_text=row["response"],
        reward=Reward(value=row["reward"], parts=dict(row["reward_parts"])),
    )
    return Recorded(place=place, rollout=rollout, advantage=row.get("advantage"))


def _weight_spans(place: Place, lists: dict[str, np.ndarray]) -> tuple[WeightSpan, ...]:
    positions = lists.get("span_positions", np.zeros(1, dtype=np.int64)).tolist()
    in_order = positions == sorted(set(positions)) and positions[:1] == [0]
    if not in_order or len(positions) != len(place.weight_versions):
        raise ValueError(
            f"row {place.row} has weight versions {place.weight_versions} from tokens {positions}"
        )
    if lists.get("span_keeps_caches", np.zeros(0, dtype=bool)).any():
        raise ValueError(
            f"row {place.row} went on with caches of older weights (weight_load: keep_kv), which this version cannot "
            "generate again; use the version that wrote it"
        )
    return tuple(
        WeightSpan(weight_version=version, first_position=position)
        for version, position in zip(place.weight_versions, positions, strict=True)
    )


def _iteration(file: Path) -> int:
    found = re.fullmatch(r"iteration_(\d+)", file.stem)
    return int(found[1]) if found else -1


def _unreadable(file: Path, error: BaseException) -> DataError:
    return DataError(f"{file} cannot be read as rollouts of a run: {type(error).__name__}: {error}")
