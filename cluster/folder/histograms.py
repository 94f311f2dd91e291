"""Histograms whose bins fit together from iteration to iteration: widths are powers of two, edges multiples of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhfspec.core.files import append_whole

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
    for line in path.read_bytes().split(b"\n") if path.is_file() else []:
        try:
            tree = json.loads(line)
            iteration = int(tree.pop("iteration"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            continue
        found = {
            str(name): histogram for name, one in tree.items() if (histogram := Histogram.from_tree(one))
        }
        rows.append((iteration, found))
    return rows
