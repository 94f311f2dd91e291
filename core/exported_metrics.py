"""Every metric that a monitoring system sees: its name at the metrics port, type, unit, labels, meaning.

Ray exports it as `ray_rlhfspec_NAME`, of a counter with `_total` behind. Every one has the label `run`. What an
iteration's figures say (`core.metric_registry`) is exported as gauges of the last iteration, by the names of
`figure_name`. `actors.waiting.run_metrics` refuses a name that is neither. No label is called
`instance`: Prometheus has that for the node's port.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rlhfspec.core.metric_registry import declared, find_metric

Kind = Literal["gauge", "counter", "histogram"]
MOST_NUMBERS = 64
_NUMBER = re.compile(r"[0-9]+")
_NUMBERS = re.compile(r"(?:-r?[0-9]+)+")
PREFIX = "rlhfspec_"
"Ray puts `ray_` before it."


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """One metric of the metrics port."""

    name: str
    kind: Kind
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


def _of(kind: Kind, *rows: tuple[str, str, str] | tuple[str, str, str, str]) -> list[Exported]:
    return [
        Exported(name=name, kind=kind, unit=unit, help=text, labels=tuple(labels))
        for name, unit, text, *labels in rows
    ]


_LIVE = [
    # the loop
    *_of(
        "gauge",
        ("run_up", "flag", "1 while the run's loop lives, 0 after its end"),
        ("run_outlived", "flag", "1: Ray goes on after the run, 0: it is the run's own and ends with it"),
        ("heartbeat_timestamp_seconds", "s", "when the loop's process last gave a sign of life"),
        ("end_timestamp_seconds", "s", "when the loop ended, however it did, unless it was killed; 0 before"),
        ("progress_timestamp_seconds", "s", "when iteration, phase, samples or tokens last moved on"),
        ("iteration", "1", "iteration in progress, counted from 1"),
        ("iterations_planned", "1", "iterations of the whole run"),
        ("samples_done", "samples", "of the phase in progress"),
        ("samples_planned", "samples", "of the phase in progress"),
        ("policy_weight_version", "version", "of the target that was published last"),
        ("wait_seconds", "s", "longest wait that is open in the loop; 0 without any"),
        ("instance_serving", "instances", "of this label that take samples; 0: given up or ended", "actor"),
        ("scheduler_silent_seconds", "s", "since the scheduler last answered the loop's observer"),
    ),
    *_of(
        "counter",
        ("iterations", "1", "iterations that ended"),
        ("phase_seconds", "s", "spent in each phase of the iterations", "phase"),
        ("waited_seconds", "s", "that the loop waited for answers", "waited_for"),
        ("late_answers", "1", "times that an answer took unusually long", "waited_for"),
        ("lost_actors", "1", "actors that died or were given up", "pool"),
        ("replaced_actors", "1", "actors that took a lost one's place", "pool"),
        ("integrity_alarms", "1", "reports of a sample that were dropped because another owns it"),
        ("dropped_writes", "1", "lines of a log, or live pages, that could not be written", "file"),
    ),
    # an instance
    *_of(
        "gauge",
        (
            "instance_goodput_tokens_per_second",
            "tokens/s",
            "emitted tokens a second as the engine last measured it; 0 when nothing runs",
            "actor",
        ),
        (
            "instance_acceptance_length_tokens",
            "tokens",
            "tokens emitted a sample and decode step since the last refresh",
            "actor",
        ),
        ("instance_running_samples", "samples", "in the running batch", "actor"),
        ("instance_waiting_samples", "samples", "accepted but not yet running", "actor"),
        ("instance_context_tokens", "tokens", "committed tokens of the running samples", "actor"),
        ("instance_weight_version", "version", "of the target's weights", "actor"),
        ("instance_drafter_alarm", "flag", "1: drafting was suspended here", "actor"),
    ),
    *_of(
        "counter",
        ("emitted_tokens", "tokens", "response tokens emitted", "actor"),
        ("sample_steps", "1", "sum over decode steps of the samples in them", "actor"),
        ("draft_tokens", "tokens", "draft tokens verified", "actor"),
        ("accepted_tokens", "tokens", "draft tokens accepted", "actor"),
        (
            "accepted_looked_up_tokens",
            "tokens",
            "of these, looked up beside a drafter that computes (speculation.look_up)",
            "actor",
        ),
        ("completions", "samples", "samples that ended", "actor"),
        ("move_seconds", "s", "that the decode thread gave to moving samples", "actor"),
        ("spot_seconds", "s", "that it trained a draft head while it had no samples", "actor"),
        ("spot_steps", "1", "optimizer steps of that training", "actor"),
        ("spot_tokens", "tokens", "positions that it learned from", "actor"),
        (
            "preemptions",
            "1",
            "running samples that had to wait because the caches were full",
            "actor",
        ),
    ),
    # every process
    *_of(
        "gauge",
        (
            "process_resident_bytes",
            "bytes",
            "memory of the process, object store that it maps included",
            "actor",
        ),
        (
            "process_shared_bytes",
            "bytes",
            "of that, shared with others: what it maps of the object store",
            "actor",
        ),
        ("process_gpu_bytes", "bytes", "that torch has reserved on the process's GPU", "actor"),
    ),
    # moves
    Exported(
        name="moves",
        kind="counter",
        unit="moves",
        help="moves of samples that ended",
        labels=("outcome", "mode"),
    ),
    *_of("counter", ("moved_bytes", "bytes", "bytes of caches that came with moved samples", "stage")),
    Exported(
        name="move_downtime_seconds",
        kind="histogram",
        unit="s",
        help="from the last decode step at the source to the first at the destination",
        labels=("mode",),
        bounds=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0),
    ),
]
RAY_SERIES = {
    "ray_object_store_memory": "bytes of the object stores, by Location",
    "ray_node_mem_used": "bytes of each node",
    "ray_node_mem_total": "bytes of each node",
    "ray_node_disk_free": "bytes of each node's disk",
}
"Of Ray's own series, those that the dashboard and the alerts read."
_BY_NAME = {metric.name: metric for metric in _LIVE}


def live_metrics() -> tuple[Exported, ...]:
    """Those that are set while an iteration runs."""
    return tuple(_LIVE)


def figure_name(figure: str) -> str:
    """The exported name of a figure such as `time/update_s`: `time_update_seconds`."""
    name = re.sub(r"_per_s(?=_|$)", "_per_second", figure)
    name = re.sub(r"(?<!per)_s(?=_|$)", "_seconds", name)
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def figure_metrics() -> tuple[Exported, ...]:
    """Gauges of all declared figures; of a family's, the name ends in `*` or has one inside."""
    return tuple(
        Exported(
            name="*".join(figure_name(part) for part in metric.name.split("*")),
            kind="gauge",
            unit=metric.unit,
            help=f"{metric.help} (last iteration)",
        )
        for metric in declared()
    )


def exported_figure(figure: str) -> Exported | None:
    """How a figure is exported; None where none of that name is declared."""
    metric = find_metric(figure)
    if metric is None:
        return None
    return Exported(
        name=figure_name(figure), kind="gauge", unit=metric.unit, help=f"{metric.help} (last iteration)"
    )


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


def find_live(name: str) -> Exported | None:
    """The live metric of that name."""
    return _BY_NAME.get(name)
