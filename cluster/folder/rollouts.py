"""Rollouts as Parquet, one file an iteration, one row a sample by sample index: the schema, its writer and readers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...core.errors import DataError
from ...core.files import write_whole
from ...core.records import (
    Completion,
    FinishReason,
    Prompt,
    Reward,
    Rollout,
    SampleKey,
    Stream,
    WeightSpan,
)

SCHEMA_VERSION = "5"
"1 had no advantages, 2 one weight version a sample, 3 whether caches of older weights were kept, 4 no draft depths."

SCHEMA = pa.schema(
    [
        ("run_seed", pa.uint64()),
        ("stream", pa.string()),
        ("sample_index", pa.uint64()),
        ("group_id", pa.int64()),
        ("prompt_id", pa.int64()),
        ("prompt", pa.string()),
        ("reference", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("response", pa.string()),
        ("response_token_ids", pa.list_(pa.int32())),
        ("policy_logprobs", pa.list_(pa.float32())),
        ("sampling_logprobs", pa.list_(pa.float32())),
        ("response_sampled", pa.list_(pa.bool_())),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("advantage", pa.float32()),
        ("finish_reason", pa.string()),
        ("weight_version", pa.int64()),
        ("span_versions", pa.list_(pa.int32())),
        ("span_positions", pa.list_(pa.int32())),
        ("epoch", pa.int32()),
        ("instance", pa.string()),
        ("num_decode_steps", pa.int32()),
        ("num_accepted_tokens", pa.int32()),
        ("draft_depths", pa.list_(pa.uint8())),
    ],
    metadata={"schema_version": SCHEMA_VERSION},
)


_TOKENS = "reward_tokens"
"`Reward.tokens`: in files that hold a reward which is paid before the end."


def write_rollouts(
    path: Path, rollouts: Sequence[Rollout], advantages: Sequence[float | None] | None = None
) -> None:
    """Write the file whole or not at all. Raises StorageError.

    `advantages` are the samples' means, null of those that it has not computed, or not learned from.
    """
    rows = [_row(rollout) for rollout in rollouts]
    for row, advantage in zip(rows, advantages or [None] * len(rows), strict=True):
        row["advantage"] = advantage
    pays_tokens = any(rollout.reward.tokens for rollout in rollouts)
    schema = SCHEMA.append(pa.field(_TOKENS, pa.list_(pa.float64()))) if pays_tokens else SCHEMA
    table = pa.Table.from_pylist(rows, schema=schema)
    file = BytesIO()
    pq.write_table(table, file, compression="zstd")
    write_whole(path, file.getvalue())


def _row(rollout: Rollout) -> dict[str, object]:
    prompt, completion, reward = rollout.prompt, rollout.completion, rollout.reward
    return {
        "run_seed": completion.key.run_seed,
        "stream": str(completion.key.stream),
        "sample_index": completion.key.sample_index,
        "group_id": completion.group_id,
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.text,
        "reference": prompt.reference,
        "prompt_token_ids": prompt.token_ids.astype(np.int32),
        "response": rollout.response_text,
        "response_token_ids": completion.token_ids.astype(np.int32),
        "policy_logprobs": completion.policy_logprobs,
        "sampling_logprobs": completion.sampling_logprobs,
        # null where all were sampled
        "response_sampled": completion.sampled,
        "reward": reward.value,
        "reward_parts": list(reward.parts.items()),
        _TOKENS: reward.tokens or None,
        "finish_reason": str(completion.finish_reason),
        # of the last token; where a response comes of several: each one, and its first token
        "weight_version": completion.weight_spans[-1].weight_version,
        "span_versions": _spans([span.weight_version for span in completion.weight_spans]),
        "span_positions": _spans([span.first_position for span in completion.weight_spans]),
        "epoch": completion.epoch,
        "instance": completion.instance,
        "num_decode_steps": completion.num_decode_steps,
        "num_accepted_tokens": completion.num_accepted_tokens,
        "draft_depths": completion.draft_depths,
    }


def _spans(numbers: list[int]) -> list[int] | None:
    return numbers if len(numbers) > 1 else None


_INDEX = ("run_seed", "stream", "sample_index", "weight_version")
_UNREADABLE = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError, AttributeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLocation:
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

    location: SampleLocation
    rollout: Rollout
    advantage: float | None


def rollout_files(run: Path) -> list[Path]:
    """The rollout files of a run, by iteration."""
    return sorted((run / "rollouts").glob("iteration_*.parquet"), key=iteration_of)


def locations_in(file: Path) -> list[SampleLocation]:
    """Every sample of a rollout file. Raises DataError: it cannot be read."""
    try:
        rows = _table(file, [*_INDEX, "span_versions"]).to_pylist()
        return [
            SampleLocation(
                file=file,
                row=row,
                iteration=iteration_of(file),
                key=SampleKey(
                    run_seed=one["run_seed"], stream=Stream(one["stream"]), sample_index=one["sample_index"]
                ),
                weight_versions=tuple(one.get("span_versions") or (int(one["weight_version"]),)),
            )
            for row, one in enumerate(rows)
        ]
    except _UNREADABLE as error:
        raise _unreadable(file, error) from error


def read_recorded(locations: Sequence[SampleLocation]) -> list[Recorded]:
    """Read samples of one file whole. Raises DataError: it cannot be read."""
    if not locations:
        return []
    file = locations[0].file
    try:
        table = _table(file)
        arrays = {
            name: _lists(table, name)
            for name in _ARRAYS
            if name in table.column_names or name not in _OPTIONAL
        }
        plain = [name for name in table.column_names if name not in arrays]
        rows = table.select(plain).to_pylist()
        return [
            _recorded(
                location, rows[location.row], {name: lists[location.row] for name, lists in arrays.items()}
            )
            for location in locations
        ]
    except _UNREADABLE as error:
        raise _unreadable(file, error) from error


def _table(file: Path, columns: list[str] | None = None) -> pa.Table:
    # read_table would import pyarrow's data sets first, which takes longer than most files
    with pq.ParquetFile(file) as opened:
        # files of older versions have no spans
        there = opened.schema_arrow.names
        return opened.read(columns and [name for name in columns if name in there or name not in _OPTIONAL])


_ARRAYS = {
    "prompt_token_ids": (pa.int32(), np.int32),
    "response_token_ids": (pa.int32(), np.int32),
    "policy_logprobs": (pa.float32(), np.float32),
    "sampling_logprobs": (pa.float32(), np.float32),
    "response_sampled": (pa.bool_(), np.bool_),
    "span_versions": (pa.int32(), np.int32),
    "span_positions": (pa.int32(), np.int32),
    "span_keeps_caches": (pa.bool_(), np.bool_),
    "draft_depths": (pa.uint8(), np.uint8),
    _TOKENS: (pa.float64(), np.float64),
}
_OPTIONAL = ("span_versions", "span_positions", "span_keeps_caches", "draft_depths", _TOKENS)
"Files of versions before these have none; that of caches is in those of schema 3 alone."


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


def _recorded(
    location: SampleLocation, row: dict[str, Any], arrays: dict[str, np.ndarray | None]
) -> Recorded:
    lists = {name: array for name, array in arrays.items() if array is not None}
    for name in ("response_sampled", "draft_depths"):
        if name in lists and len(lists[name]) != len(lists["response_token_ids"]):
            raise ValueError(f"row {location.row} has {len(lists[name])} marks in {name} for its tokens")
    completion = Completion(
        key=location.key,
        prompt_id=row["prompt_id"],
        group_id=row["group_id"],
        epoch=row["epoch"],
        token_ids=lists["response_token_ids"],
        policy_logprobs=lists["policy_logprobs"],
        sampling_logprobs=lists["sampling_logprobs"],
        finish_reason=FinishReason(row["finish_reason"]),
        weight_spans=_weight_spans(location, lists),
        instance=row["instance"],
        num_decode_steps=row["num_decode_steps"],
        num_accepted_tokens=row["num_accepted_tokens"],
        sampled=lists.get("response_sampled"),
        draft_depths=lists.get("draft_depths"),
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
        reward=Reward(
            value=row["reward"],
            parts=dict(row["reward_parts"]),
            tokens=tuple(lists[_TOKENS].tolist()) if _TOKENS in lists else (),
        ),
    )
    return Recorded(location=location, rollout=rollout, advantage=row.get("advantage"))


def _weight_spans(location: SampleLocation, lists: dict[str, np.ndarray]) -> tuple[WeightSpan, ...]:
    positions = lists.get("span_positions", np.zeros(1, dtype=np.int64)).tolist()
    in_order = positions == sorted(set(positions)) and positions[:1] == [0]
    if not in_order or len(positions) != len(location.weight_versions):
        raise ValueError(
            f"row {location.row} has weight versions {location.weight_versions} from tokens {positions}"
        )
    if lists.get("span_keeps_caches", np.zeros(0, dtype=bool)).any():
        raise ValueError(
            f"row {location.row} went on with caches of older weights (weight_load: keep_kv), which this version "
            "cannot generate again; use the version that wrote it"
        )
    return tuple(
        WeightSpan(weight_version=version, first_position=position)
        for version, position in zip(location.weight_versions, positions, strict=True)
    )


def iteration_of(file: Path) -> int:
    """The iteration of a rollout file, counted from 0; -1 of another file."""
    found = re.fullmatch(r"iteration_(\d+)", file.stem)
    return int(found[1]) if found else -1


def _unreadable(file: Path, error: BaseException) -> DataError:
    return DataError(f"{file} cannot be read as rollouts of a run: {type(error).__name__}: {error}")


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
    lengths, where = [], ""
    try:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            where = f", line {number}"
            if not line.strip():
                continue
            row = json.loads(line)
            if isinstance(row, dict):
                tokens = row.get(TOKEN_COLUMN)
                if not isinstance(tokens, list | None):
                    raise ValueError(f"{TOKEN_COLUMN} is no list")
                row = row[LENGTH_COLUMN] if tokens is None else len(tokens)
            if isinstance(row, bool) or not isinstance(row, int) or row >= 2**31:
                raise ValueError(f"got {row!r}")
            lengths.append(row)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path}{where} cannot be read as a length: {error}; expected JSON lines: whole numbers, or objects "
            f"with {LENGTH_COLUMN} or {TOKEN_COLUMN}"
        ) from error
    return np.array(lengths, dtype=np.int64)
