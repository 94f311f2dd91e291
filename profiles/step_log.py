"""A step log on disk: what every decode step saw, decided and did, so that its decisions can be replayed.

Parquet, one row a decode step, lossless: the nested columns `state`, `budget` and `draft` are the records of that
name (`core.records`), `draft` is null where no refined draft was made. Scores are float32, seconds float64. What the
policy was made from stands in the file's metadata, so that nothing else is needed to make it again. A run's log is a
folder an instance, with a file an iteration.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..core.config import SpeculationConfig
from ..core.decode_records import Budget, DecodeState, DraftLog, LookUpLog, StepRecord
from ..core.errors import DataError, one_line
from .profile import Profile, profile_from_tree

VERSION = b"4"
_VERSION_KEY = b"step_log_version"
_ORIGIN_KEY = b"policy_origin"
_PLAIN = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "str": pa.string()}
_LOOK_UP = pa.struct(
    {"scores": pa.list_(pa.float32()), "used": pa.list_(pa.bool_()), "seconds": pa.float64()}
)
_DRAFT = pa.struct(
    {
        "scores": pa.list_(pa.float32()),
        "level_sizes": pa.list_(pa.int64()),
        "num_nodes": pa.list_(pa.int64()),
        "num_accepted": pa.list_(pa.int64()),
        "look_up": _LOOK_UP,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOrigin:
    """What a draft policy is made from."""

    speculation: SpeculationConfig
    profile: Profile | None = None
    takes_drafts: bool = False
    "of requests"


def encode_step_log(records: Iterable[StepRecord], origin: PolicyOrigin) -> bytes:
    """Return records in order as the bytes of a file.

    Raises DataError when a draft's scores are not float32: they would not come back as they were.
    """
    profile = None if origin.profile is None else asdict(origin.profile)
    tree = {
        "speculation": origin.speculation.model_dump(mode="json"),
        "profile": profile,
        "takes_drafts": origin.takes_drafts,
    }
    schema = _SCHEMA.with_metadata({_VERSION_KEY: VERSION, _ORIGIN_KEY: json.dumps(tree).encode()})
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([_row(record) for record in records], schema=schema), file)
    return file.getvalue()


def read_step_log(path: Path) -> tuple[list[StepRecord], PolicyOrigin]:
    """Read a file, or a folder of them in the order of their names: records in order, and the policy's origin.

    Raises DataError when there is no step log of this version, or it is damaged.
    """
    parts = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not parts:
        raise DataError(f"{path} holds no step log: expected .parquet files in it, found none")
    records: list[StepRecord] = []
    origins: list[PolicyOrigin] = []
    for part in parts:
        found, origin = _read_part(part)
        records += found
        origins.append(origin)
    if any(origin != origins[0] for origin in origins):
        raise DataError(
            f"{path} holds step logs of different policies; give one instance's folder, or one file"
        )
    return records, origins[0]


def _read_part(path: Path) -> tuple[list[StepRecord], PolicyOrigin]:
    try:
        table = pq.read_table(path)
        metadata = table.schema.metadata or {}
        version = metadata.get(_VERSION_KEY)
        if version != VERSION:
            raise ValueError(f"its version is {version}, expected {VERSION}")
        tree = json.loads(metadata[_ORIGIN_KEY])
        profile = None if tree["profile"] is None else profile_from_tree(tree["profile"])
        origin = PolicyOrigin(
            speculation=SpeculationConfig(**tree["speculation"]),
            profile=profile,
            takes_drafts=tree.get("takes_drafts", False),
        )
        return [_record(row) for row in table.to_pylist()], origin
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is not a step log this version can read: {one_line(str(error))}") from error


def _row(record: StepRecord) -> dict[str, Any]:
    row = _plain(record) | {"state": _plain(record.state), "budget": _plain(record.budget)}
    draft = record.draft
    if draft is not None:
        if draft.scores.dtype != np.float32:
            raise DataError(
                f"scores of decode step {record.decode_step} are {draft.scores.dtype}, expected float32"
            )
        found = draft.look_up
        look_up = None if found is None else _plain(found) | {"scores": found.scores.ravel()}
        row["draft"] = _plain(draft) | {"scores": draft.scores.ravel(), "look_up": look_up}
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
        look_up=None if row["look_up"] is None else _look_up(row["look_up"]),
    )


def _look_up(row: dict[str, Any]) -> LookUpLog:
    used = np.asarray(row["used"], dtype=bool)
    scores = np.asarray(row["scores"], dtype=np.float32)
    return LookUpLog(scores=scores.reshape(len(used), -1), used=used, seconds=row["seconds"])


def _struct(record: type) -> pa.StructType:
    # annotations are strings in `core.records`
    return pa.struct({field.name: _PLAIN[str(field.type)] for field in fields(record)})


_NESTED = {"state": _struct(DecodeState), "budget": _struct(Budget), "draft": _DRAFT}
_SCHEMA = pa.schema(
    {field.name: _NESTED.get(field.name) or _PLAIN[str(field.type)] for field in fields(StepRecord)},
)
