"""A process's door to the node's metrics port: every metric with the label `run`, none that is not declared.

The loop and each actor `begin` with the run's name; before that, and outside of a run, what is set goes nowhere.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

from ray.util.metrics import Counter, Gauge, Histogram

from ...core.errors import RlhfSpecError
from ...core.metrics import LIVE, PREFIX, Exported, bounded_label, exported


class Sink(Protocol):
    """What takes values: Ray, or a test's notebook."""

    def record(self, metric: Exported, value: float, labels: dict[str, str]) -> None:
        """Set a gauge, add to a counter, or observe."""
        ...


class RaySink:
    """Ray's metrics, one object a name in this process."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._metrics: dict[str, Any] = {}
        self._lock = threading.Lock()

    def record(self, metric: Exported, value: float, labels: dict[str, str]) -> None:
        """As the protocol says."""
        made = self._metrics.get(metric.name) or self._make(metric)
        if metric.kind == "counter":
            made.inc(value, tags=labels)
        elif metric.kind == "gauge":
            made.set(value, tags=labels)
        else:
            made.observe(value, tags=labels)

    def _make(self, metric: Exported) -> Any:
        with self._lock:
            if metric.name not in self._metrics:
                name, tags = f"{PREFIX}{metric.name}", ("run", *metric.labels)
                text = f"{metric.help[0].upper()}{metric.help[1:]} [{metric.unit}]"
                if metric.kind == "histogram":
                    made: Any = Histogram(
                        name, description=text, boundaries=list(metric.bounds), tag_keys=tags
                    )
                else:
                    made = {"gauge": Gauge, "counter": Counter}[metric.kind](
                        name, description=text, tag_keys=tags
                    )
                made.set_default_tags({"run": self._run})
                self._metrics[metric.name] = made
            return self._metrics[metric.name]


_sink: Sink | None = None


def begin(sink: Sink | None) -> None:
    """Let what this process sets go there from now on; None: nowhere."""
    global _sink
    _sink = sink


def set_value(name: str, value: float, **labels: str) -> None:
    """Set a gauge. Raises RlhfSpecError where it is not declared."""
    _record(name, "gauge", float(value), labels)


def add(name: str, amount: float = 1.0, **labels: str) -> None:
    """Add to a counter; nothing where `amount` is not above 0. Raises RlhfSpecError where it is not declared."""
    if amount > 0.0:
        _record(name, "counter", float(amount), labels)


def observe(name: str, value: float, **labels: str) -> None:
    """Put a value into a histogram. Raises RlhfSpecError where it is not declared."""
    _record(name, "histogram", float(value), labels)


def set_metrics(metrics: Mapping[str, float]) -> None:
    """Set the gauges of an iteration's metrics."""
    for name, value in metrics.items():
        metric = exported(name)
        if metric is None:
            raise _not_declared(name)
        if _sink is not None:
            _sink.record(metric, float(value), {})


def _record(name: str, kind: str, value: float, labels: dict[str, str]) -> None:
    metric = LIVE.get(name)
    if metric is None or metric.kind != kind or set(metric.labels) != set(labels):
        raise _not_declared(f"{name} ({kind}, labels {', '.join(sorted(labels)) or 'none'})")
    if _sink is not None:
        _sink.record(metric, value, {label: bounded_label(label, text) for label, text in labels.items()})


def _not_declared(what: str) -> RlhfSpecError:
    return RlhfSpecError(
        f"exported metric {what} is not declared; expected one of core/metrics.toml, kind and labels as there: "
        "declare it before anything sets it"
    )
