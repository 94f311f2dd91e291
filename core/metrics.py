"""Metrics: the table of all that a run may set (`metrics.toml`), their names at the metrics port, `metrics.jsonl`.

Whatever sets, draws or compares metrics goes by the table; a name that is not in it is refused. Ray exports each as
`ray_rlhfspec_NAME`, of a counter with `_total` behind, with the label `run`; an iteration's metrics are gauges there.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from .errors import RlhfSpecError
from .files import append_whole

PREFIX = "rlhfspec_"
"Ray puts `ray_` before it."
RAY_SERIES = ("ray_object_store_memory", "ray_node_mem_used", "ray_node_mem_total", "ray_node_disk_free")
"Of Ray's own series, those that the dashboard and the alerts read."
MOST_NUMBERS = 64
_NUMBER = re.compile(r"[0-9]+")
_NUMBERS = re.compile(r"(?:-r?[0-9]+)+")
_DOWNTIME_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric of an iteration, or a family of them."""

    name: str
    unit: str
    kind: Literal["mean", "sum", "last"]
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """One metric of the metrics port."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    "beside `run`"
    bounds: tuple[float, ...] = ()
    "of a histogram's buckets"

    @property
    def series(self) -> str:
        """The name that queries use; a histogram's parts have `_bucket`, `_sum`, `_count` behind it."""
        return f"ray_{PREFIX}{self.name}" + ("_total" if self.kind == "counter" else "")


_TABLE = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))
METRICS = {
    f"{area}/{name}": Metric(name=f"{area}/{name}", kind=kind, unit=unit, help=text)
    for area, rows in _TABLE["iteration"].items()
    for name, (kind, unit, text) in rows.items()
}
LIVE = {
    name: Exported(
        name=name,
        kind=kind,
        unit=unit,
        help=text,
        labels=tuple(labels),
        bounds=_DOWNTIME_BOUNDS if kind == "histogram" else (),
    )
    for kind, rows in _TABLE["live"].items()
    for name, (unit, text, *labels) in rows.items()
}
"Those that are set while an iteration runs."


def find_metric(name: str) -> Metric | None:
    """The metric of that name, or the first family that it belongs to."""
    families = (one for one in METRICS.values() if "*" in one.name and fnmatchcase(name, one.name))
    return METRICS.get(name) or next(families, None)


def require_declared(names: Iterable[str]) -> None:
    """Raise RlhfSpecError naming the first metric that is not declared."""
    for name in names:
        if find_metric(name) is None:
            raise RlhfSpecError(
                f"metric {name} is not declared; expected a name of core/metrics.toml: declare it there, with unit and "
                "meaning, before anything sets it"
            )


def exported_name(name: str) -> str:
    """What a metric such as `time/update_s` is called at the port: `time_update_seconds`."""
    name = re.sub(r"_per_s(?=_|$)", "_per_second", name)
    name = re.sub(r"(?<!per)_s(?=_|$)", "_seconds", name)
    return re.sub(r"[^a-zA-Z0-9_*]", "_", name)


def exported(name: str) -> Exported | None:
    """How a metric of an iteration is exported; None where none of that name is declared."""
    metric = find_metric(name)
    if metric is None:
        return None
    text = f"{metric.help} (last iteration)"
    return Exported(name=exported_name(name), kind="gauge", unit=metric.unit, help=text)


def bounded_label(label: str, value: str) -> str:
    """A label's value out of a bounded set: panels and alerts group by them, and Ray keeps counters of the dead.

    Of actors, numbers begin anew at MOST_NUMBERS: `gen-0-r65` is told as `gen-0-r1`. Of who is waited for, the kinds.
    Whoever sets a gauge for several actors adds up those of one value first.
    """
    if label == "waited_for":
        return ", ".join(dict.fromkeys(_NUMBERS.sub("", one) for one in value.split(", ")))
    if label == "actor":
        return _NUMBER.sub(lambda match: str(int(match[0]) % MOST_NUMBERS), value)
    return value


class MetricsLog:
    """Appends one object a line to `metrics.jsonl`; every line is complete or absent.

    Raises RlhfSpecError when a value is not finite, naming the metric: a run must not go on with it. The same for a
    name that is not declared.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one iteration. Raises StorageError when the disk is full."""
        require_declared(metrics)
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise RlhfSpecError(
                    f"metric {name} of iteration {iteration} is {value}; expected a finite number"
                )
        line = json.dumps({"iteration": iteration, **{k: float(v) for k, v in metrics.items()}})
        append_whole(self.path, line + "\n")


def read_metrics(path: str | Path, *, note: Callable[[str], None] | None = None) -> list[dict[str, float]]:
    """Read a metrics file back, one dict an iteration.

    A line that is cut or damaged (a full disk, a killed process) is left out, and `note` is told of it.
    """
    rows: list[dict[str, float]] = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        row = _row(line)
        if row is not None:
            rows.append(row)
        elif note is not None:
            note(f"{path}:{number} is cut or damaged and left out")
    return rows


def _row(line: bytes) -> dict[str, float] | None:
    """The metrics of one line; None unless it is an object of finite numbers."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not all(_is_value(value) for value in row.values()):
        return None
    return row


def _is_value(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # false for NaN and infinity; an integer may be beyond any float
