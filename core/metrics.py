"""Metric names and the JSONL sink. Names read `area/name_unit`; one JSON object an iteration."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from core.errors import RlhfSpecError
from core.files import append_whole


class MetricsLog:
    """Appends one object a line to `metrics.jsonl`; every line is complete or absent.

    Raises RlhfSpecError when a value is not finite, naming the metric: a run must not go on with it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write(self, iteration: int, figures: Mapping[str, float]) -> None:
        """Append the figures of one iteration. Raises StorageError when the disk is full."""
        for name, value in figures.items():
            if not math.isfinite(value):
                raise RlhfSpecError(
                    f"metric {name} of iteration {iteration} is {value}; expected a finite number"
                )
        line = json.dumps({"iteration": iteration, **{k: float(v) for k, v in figures.items()}})
        append_whole(self.path, line + "\n")


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Read a metrics file back, one dict an iteration."""
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line]
