"""A timeline in the Trace Event Format of Chrome, which ui.perfetto.dev opens.

One process an instance, with the threads `decode`, `send` and `receive`; complete events in microseconds; an arrow
(flow) from what a moved sample left with to its arrival.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhfspec.cluster.reporting.timeline import Interval, Journey, Lane, Timeline
from rlhfspec.core.files import write_whole
from rlhfspec.policies.scheduling.events import MoveRecord

DECODE_THREAD = 1
_LEAST_US = 0.001
"No event is shorter: an empty one would enclose no end of an arrow."

Event = dict[str, Any]


def write_trace(timeline: Timeline, path: Path, *, title: str = "") -> None:
    """Write the trace as one JSON object. Raises StorageError."""
    write_whole(path, trace_text(timeline, title=title))


def trace_text(timeline: Timeline, *, title: str = "") -> str:
    """The trace as one JSON object."""
    began = datetime.fromtimestamp(timeline.began_s, tz=UTC).isoformat()
    trace = {
        "traceEvents": trace_events(timeline),
        "displayTimeUnit": "ms",
        "otherData": {"title": title, "began": began},
    }
    return json.dumps(trace)


def trace_events(timeline: Timeline) -> list[Event]:
    """Names of processes and threads first, then everything else in order of time."""
    names: list[Event] = []
    events: list[Event] = []
    where: dict[tuple[str, Interval], tuple[int, int]] = {}
    for pid, lane in enumerate(timeline.lanes, start=1):
        names += _named(pid, 0, "process", lane.instance)
        for tid, (thread, intervals) in enumerate(_threads(lane), start=DECODE_THREAD):
            names += _named(pid, tid, "thread", thread)
            for one in intervals:
                where[lane.instance, one] = (pid, tid)
                events.append(_complete(one, thread, pid, tid, timeline))
    for number, journey in enumerate(timeline.journeys, start=1):
        events += _flow(number, journey, where)
    return names + sorted(events, key=lambda event: event["ts"])


def _threads(lane: Lane) -> Iterator[tuple[str, Sequence[Interval]]]:
    """Transfers with several peers may overlap, the events of one thread may not: further ones share the load."""
    yield "decode", sorted((*lane.steps, *lane.attaches), key=lambda one: one.begin_s)
    for name, transfers in (("send", lane.sends), ("receive", lane.receives)):
        for number, row in enumerate(_rows(transfers) or [[]], start=1):
            yield (name if number == 1 else f"{name} {number}"), row


def _rows(intervals: Sequence[Interval]) -> list[list[Interval]]:
    rows: list[list[Interval]] = []
    for one in intervals:
        free = next((row for row in rows if row[-1].end_s <= one.begin_s), None)
        if free is None:
            rows.append([one])
        else:
            free.append(one)
    return rows


def _named(pid: int, tid: int, what: str, name: str) -> list[Event]:
    place = {"ph": "M", "pid": pid, "tid": tid}
    order = {f"{what}_sort_index": pid if what == "process" else tid}
    return [
        {"name": f"{what}_name", "args": {"name": name}} | place,
        {"name": f"{what}_sort_index", "args": {"sort_index": order[f"{what}_sort_index"]}} | place,
    ]


def _complete(one: Interval, thread: str, pid: int, tid: int, timeline: Timeline) -> Event:
    if one.move_id:
        kind = thread.partition(" ")[0].replace("decode", "attach")
        name, args = f"{kind} {one.move_id}", _describe(one, timeline.records.get(one.move_id))
    else:
        # the viewer colours by name: batches of unlike size look unlike
        kind, name = "step", f"step of {one.num_samples}"
        args = {"samples": one.num_samples, "tokens": one.num_tokens, "context": one.context_tokens}
    # from rounded ends, so that what follows at once does not overlap
    duration_us = max(round(_us(one.end_s) - _us(one.begin_s), 3), _LEAST_US)
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "ts": _us(one.begin_s),
        "dur": duration_us,
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _describe(one: Interval, record: MoveRecord | None) -> dict[str, Any]:
    args: dict[str, Any] = {"move": one.move_id}
    if one.peer:
        args["peer"] = one.peer
    if record is not None:
        args |= {
            "sample": record.order.key.sample_index,
            "mode": str(record.order.mode),
            "outcome": record.outcome,
            "why_ordered": record.why_ordered,
            "why_ended": record.why_ended,
            "predicted_gain_s": record.gain_s,
        }
        args |= record.figures
    return args


def _flow(
    number: int, journey: Journey, where: dict[tuple[str, Interval], tuple[int, int]]
) -> tuple[Event, ...]:
    """Both ends, each within the event it belongs to; none where clocks of two machines contradict the journey."""
    if journey.arrived.begin_s < journey.left.begin_s:
        return ()
    ends = (("s", journey.source, journey.left), ("f", journey.destination, journey.arrived))
    return tuple(
        {
            "name": f"move {journey.move_id}",
            "cat": "move",
            "ph": phase,
            "id": number,
            "ts": _us(one.begin_s),
            "pid": where[instance, one][0],
            "tid": where[instance, one][1],
            # without it an arrow ends at the next event, not at the one that encloses it
            **({"bp": "e"} if phase == "f" else {}),
        }
        for phase, instance, one in ends
    )


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
