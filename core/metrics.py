"""The JSONL sink of metrics: one JSON object an iteration, of names that `core.metric_registry` declares."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.core.files import append_whole
from rlhfspec.core.metric_registry import require_declared


class MetricsLog:
    """Appends one object a line to `metrics.jsonl`; every line is complete or absent.

    Raises RlhfSpecError when a value is not finite, naming the metric: a run must not go on with it. The same for a
    name that is not declared (`core.metric_registry`).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write(self, iteration: int, figures: Mapping[str, float]) -> None:
        """Append the figures of one iteration. Raises StorageError when the disk is full."""
        require_declared(figures)
        for name, value in figures.items():
            if not math.isfinite(value):
                raise RlhfSpecError(
                    f"metric {name} of iteration {iteration} is {value}; expected a finite number"
                )
        line = json.dumps({"iteration": iteration, **{k: float(v) for k, v in figures.items()}})
        append_whole(self.path, line + "\n")


def read_metrics(path: str | Path, *, note: Callable[[str], None] | None = None) -> list[dict[str, float]]:
    """Read a metrics file back, one dict an iteration.

    A line that is cut or damaged (a full disk, a killed process) is left out, and `note` is told of it.
    """
    rows: list[dict[str, float]] = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        row = _figures(line)
        if row is not None:
            rows.append(row)
        elif note is not None:
            note(f"{path}:{number} is cut or damaged and left out")
    return rows


def _figures(line: bytes) -> dict[str, float] | None:
    """The figures of one line; None unless it is an object of finite numbers."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not all(_is_figure(value) for value in row.values()):
        return None
    return row


def _is_figure(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # false for NaN and infinity; an integer may be beyond any float
