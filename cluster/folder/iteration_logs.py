"""What a run appends a line of JSON to: `weights.jsonl` (checksums of the target's versions), `moves.jsonl` (every move
that ended), `histograms.jsonl`. `metrics.jsonl` is `core.metrics`' own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.files import append_whole
from ...core.weight_records import WeightManifest
from ...policies.migration.move_messages import MoveOutcome
from ...policies.scheduling.events import MoveRecord


def note_weights(path: Path, manifest: WeightManifest) -> None:
    """Append a version that instances have confirmed. Raises StorageError."""
    line = {
        "model": manifest.model,
        "weight_version": manifest.weight_version,
        "parameter_checksum": manifest.checksum,
    }
    append_whole(path, json.dumps(line) + "\n")


def read_weights_log(path: Path) -> dict[int, str]:
    """Checksums by version, the last of each where a run was resumed; empty where there is no such file.

    A line that is cut or damaged is left out.
    """
    rows = ((tree.get("weight_version"), tree.get("parameter_checksum")) for tree in _objects(path))
    return {
        version: checksum
        for version, checksum in rows
        if isinstance(version, int) and isinstance(checksum, str)
    }


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """What the lines hold, where the file is there."""
    for line in path.read_bytes().split(b"\n") if path.is_file() else []:
        with suppress(ValueError, RecursionError):
            tree = json.loads(line)
            if isinstance(tree, dict):
                yield tree


_ODD = (MoveOutcome.TAKEN_BACK, MoveOutcome.LOST)
_LINES_LOGGED = 3


def append_moves(path: Path, iteration: int, moves: Sequence[MoveRecord]) -> None:
    """Append the moves of one iteration; without any, write nothing. Raises StorageError."""
    if moves:
        append_whole(path, "".join(json.dumps(_line(iteration, record)) + "\n" for record in moves))


def read_moves(path: Path, iteration: int) -> list[dict[str, Any]]:
    """The lines of one iteration's moves; what is cut or damaged is left out."""
    return [tree for tree in _objects(path) if tree.get("iteration") == iteration]


def odd_moves(moves: Sequence[MoveRecord]) -> list[str]:
    """What a person should know: moves that were taken back or lost; no sample is lost with them."""
    odd = [record for record in moves if record.outcome in _ODD]
    lines = [
        f"move {record.order.move_id} of sample {record.order.key.sample_index} from {record.order.source} to "
        f"{record.order.destination} was {record.outcome}: {record.why_ended or 'no reason given'}"
        for record in odd[:_LINES_LOGGED]
    ]
    if len(odd) > _LINES_LOGGED:
        lines.append(f"{len(odd) - _LINES_LOGGED} more moves were taken back or lost; see moves.jsonl")
    return lines


def _line(iteration: int, record: MoveRecord) -> dict[str, Any]:
    order = record.order
    return {
        "iteration": iteration,
        "move": order.move_id,
        "stream": str(order.key.stream),
        "sample_index": order.key.sample_index,
        "epoch": order.epoch,
        "source": order.source,
        "destination": order.destination,
        "mode": str(order.mode),
        "why_ordered": record.why_ordered,
        "predicted_gain_s": record.gain_s,
        "outcome": record.outcome,
        "why_ended": record.why_ended,
        # by the scheduler's own clock: to be compared with each other only
        "ordered_s": record.ordered_s,
        "ended_s": record.ended_s,
        "figures": dict(record.metrics),
    }


MOST_BINS = 32
_LEAST_WIDTH = 2.0**-40


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Bin i counts what is from `first + i * width` on and below the next."""

    first: float
    width: float
    counts: tuple[int, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Histogram:
        """Of at least one finite number. Raises ValueError for none."""
        if not len(values):
            raise ValueError("a histogram needs at least one value, got none")
        numbers = np.asarray(values, dtype=np.float64)
        low, high = float(numbers.min()), float(numbers.max())
        least = max((high - low) / MOST_BINS, abs(high) * 2.0**-40, abs(low) * 2.0**-40, _LEAST_WIDTH)
        width = 2.0 ** math.ceil(math.log2(least))
        if math.floor(high / width) - math.floor(low / width) >= MOST_BINS:
            width *= 2.0
        first = math.floor(low / width)
        places = np.floor(numbers / width).astype(np.int64) - first
        return cls(
            first=first * width, width=width, counts=tuple(int(count) for count in np.bincount(places))
        )

    @classmethod
    def from_tree(cls, tree: Any) -> Histogram | None:
        """What `as_tree` gave; None for anything else."""
        try:
            counts = tuple(int(count) for count in tree["counts"])
            made = cls(first=float(tree["first"]), width=float(tree["width"]), counts=counts)
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        is_sound = math.isfinite(made.first) and 0.0 < made.width < math.inf
        return made if is_sound and counts and min(counts) >= 0 else None

    def as_tree(self) -> dict[str, Any]:
        """For JSON."""
        return {"first": self.first, "width": self.width, "counts": list(self.counts)}


def write_histograms(
    path: Path,
    iteration: int,
    values: Mapping[str, Sequence[float]],
    counted: Mapping[str, Histogram] | None = None,
) -> None:
    """Append a line of `histograms.jsonl`: a histogram a name, of values or counted already. Raises StorageError."""
    row = {name: Histogram.of(those).as_tree() for name, those in values.items() if len(those)}
    row |= {name: histogram.as_tree() for name, histogram in (counted or {}).items()}
    append_whole(path, json.dumps({"iteration": iteration, **row}) + "\n")


def read_histograms(path: Path) -> list[tuple[int, dict[str, Histogram]]]:
    """(iteration, histogram by name) of every whole line; what is cut or damaged is left out."""
    rows = []
    for tree in _objects(path):
        with suppress(ValueError, TypeError, KeyError, OverflowError):
            iteration = int(tree.pop("iteration"))
            found = {name: made for name, one in tree.items() if (made := Histogram.from_tree(one))}
            rows.append((iteration, found))
    return rows
