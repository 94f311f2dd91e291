"""What the instances did when, as lanes of intervals and journeys between them; as a trace for ui.perfetto.dev.

A lane is one instance: its decode steps, the arrivals that its decode thread took in between them, and the transfers
of its other threads. A journey is one sample's way from a lane to another. Seconds count from the first decode step.
In the trace (Trace Event Format of Chrome) an instance is a process with the threads `decode`, `send` and `receive`,
times are microseconds, and an arrow goes from what a moved sample left with to its arrival.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ...actors.trace_events import TraceEvent, TraceKind
from ...core.errors import ConfigError
from ...core.files import write_whole
from ...policies.scheduling.events import MoveRecord
from ..folder.layout import KEPT_TRACES, RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A stretch of one lane, in seconds since the timeline began."""

    begin_s: float
    end_s: float
    num_samples: int = 0
    "of a decode step"
    num_tokens: int = 0
    "emitted by a decode step"
    context_tokens: int = 0
    "of its samples, before it"
    move_id: str = ""
    "of a transfer or an arrival"
    peer: str = ""
    "of a transfer: the other instance"

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One instance; each tuple is in order of time."""

    instance: str
    steps: tuple[Interval, ...]
    attaches: tuple[Interval, ...]
    "arrivals: the decode thread puts a moved sample into the running batch"
    sends: tuple[Interval, ...]
    receives: tuple[Interval, ...]

    @property
    def busy_s(self) -> float:
        """Seconds of its decode thread in decode steps and arrivals."""
        return sum(end_s - begin_s for begin_s, end_s in merge((*self.steps, *self.attaches)))

    @property
    def transfers(self) -> tuple[Interval, ...]:
        """Out and in."""
        return (*self.sends, *self.receives)


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """One sample's way to another instance."""

    move_id: str
    source: str
    destination: str
    left: Interval
    "the transfer that brought its caches, else the last decode step at the source"
    arrived: Interval
    record: MoveRecord | None
    "None when the scheduler has not said how it ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A pool over some seconds."""

    lanes: tuple[Lane, ...]
    journeys: tuple[Journey, ...]
    records: Mapping[str, MoveRecord]
    "moves that ended, by name; those that came to nothing have no journey"
    length_s: float
    began_s: float
    "wall clock"


def build_timeline(spans: Mapping[str, Sequence[TraceEvent]], moves: Sequence[MoveRecord] = ()) -> Timeline:
    """Arrange what `take_spans` gave, by instance, and the moves that the scheduler reported."""
    everything = [span for some in spans.values() for span in some]
    # a transfer that failed before its first frame has no beginning of its own
    began_s = min((span.begin_s for span in everything if span.kind != "receive"), default=0.0)
    length_s = max((span.end_s for span in everything), default=began_s) - began_s
    lanes = tuple(_lane(instance, spans[instance], began_s) for instance in sorted(spans, key=_by_number))
    records = {record.order.move_id: record for record in moves}
    return Timeline(
        lanes=lanes,
        journeys=tuple(_journeys(lanes, records)),
        records=records,
        length_s=length_s,
        began_s=began_s,
    )


def merge(intervals: Iterable[Interval], *, gap_s: float = 0.0) -> list[tuple[float, float]]:
    """(begin, end) of what the intervals cover together; gaps up to `gap_s` are covered over."""
    covered: list[tuple[float, float]] = []
    for one in sorted(intervals, key=lambda one: one.begin_s):
        if covered and one.begin_s <= covered[-1][1] + gap_s:
            covered[-1] = (covered[-1][0], max(covered[-1][1], one.end_s))
        else:
            covered.append((one.begin_s, one.end_s))
    return covered


def overlap_s(intervals: Sequence[Interval], others: Iterable[Interval]) -> float:
    """Seconds of the intervals, each counted by itself, during which at least one of the others lasts."""
    covered = [pair for pair in merge(others) if pair[1] > pair[0]]
    if not covered or not intervals:
        return 0.0
    edges = np.array(covered).ravel()
    # covered seconds before each edge: they grow within a pair and stand still between pairs
    before = np.concatenate([[0.0], np.cumsum(np.diff(edges) * (np.arange(len(edges) - 1) % 2 == 0))])
    ends = np.array([(one.begin_s, one.end_s) for one in intervals])
    return float(np.diff(np.interp(ends, edges, before), axis=1).sum())


def _lane(instance: str, spans: Sequence[TraceEvent], began_s: float) -> Lane:
    def of(kind: TraceKind) -> tuple[Interval, ...]:
        found = [_interval(span, began_s) for span in spans if span.kind == kind]
        return tuple(sorted(_one_after_the_other(found), key=lambda one: one.begin_s))

    return Lane(
        instance=instance,
        steps=of("step"),
        attaches=of("attach"),
        sends=of("send"),
        receives=of("receive"),
    )


def _interval(span: TraceEvent, began_s: float) -> Interval:
    """Labels read `MOVE`, `MOVE to PEER` or `MOVE from PEER`."""
    move_id, _, rest = span.label.partition(" ")
    return Interval(
        begin_s=max(span.begin_s - began_s, 0.0),
        end_s=max(span.end_s - began_s, 0.0),
        num_samples=span.num_samples,
        num_tokens=span.num_tokens,
        context_tokens=span.context_tokens,
        move_id=move_id,
        peer=rest.partition(" ")[2],
    )


def _one_after_the_other(intervals: Iterable[Interval]) -> list[Interval]:
    """What one thread did (there is one for each kind and peer): nothing begins before the last has ended."""
    busy_until_s: dict[str, float] = {}
    ordered = []
    for one in sorted(intervals, key=lambda one: one.end_s):
        free_s = busy_until_s.get(one.peer, 0.0)
        ordered.append(replace(one, begin_s=max(one.begin_s, free_s)) if one.begin_s < free_s else one)
        busy_until_s[one.peer] = one.end_s
    return ordered


def _journeys(lanes: Sequence[Lane], records: Mapping[str, MoveRecord]) -> Iterable[Journey]:
    by_name = {lane.instance: lane for lane in lanes}
    sends = {send.move_id: (lane, send) for lane in lanes for send in lane.sends}
    for lane in lanes:
        for arrived in lane.attaches:
            record = records.get(arrived.move_id)
            source, left = sends.get(arrived.move_id, (None, None))
            if source is None and record is not None:
                source = by_name.get(record.order.source)
                left = _last_step(source, arrived.begin_s) if source is not None else None
            if source is not None and left is not None:
                yield Journey(
                    move_id=arrived.move_id,
                    source=source.instance,
                    destination=lane.instance,
                    left=left,
                    arrived=arrived,
                    record=record,
                )


def _last_step(lane: Lane, until_s: float) -> Interval | None:
    number = bisect_right(lane.steps, until_s, key=lambda step: step.end_s)
    return lane.steps[number - 1] if number else None


def _by_number(instance: str) -> list[tuple[int, int | str]]:
    """gen-2 comes before gen-10, and a replacement behind what it replaces."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in instance.split("-")]


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
        args |= record.metrics
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


def read_trace(text: bytes) -> Timeline:
    """The timeline of a trace that `trace_text` made, without the scheduler's records of its moves.

    Raises ConfigError when it is none.
    """
    try:
        trace = json.loads(text)
        events = trace["traceEvents"]
        names = {
            event["pid"]: str(event["args"]["name"]) for event in events if event["name"] == "process_name"
        }
        found: dict[tuple[int, str], list[Interval]] = {}
        where: dict[tuple[int, int, float], Interval] = {}
        ends: dict[int, dict[str, Event]] = {}
        for event in events:
            if event["ph"] == "X":
                one = _read_interval(event)
                found.setdefault((event["pid"], event["cat"]), []).append(one)
                where[event["pid"], event["tid"], event["ts"]] = one
            elif event["ph"] in ("s", "f"):
                ends.setdefault(event["id"], {})[event["ph"]] = event
        journeys = tuple(
            Journey(
                move_id=str(left["name"]).removeprefix("move "),
                source=names[left["pid"]],
                destination=names[arrived["pid"]],
                left=where[left["pid"], left["tid"], left["ts"]],
                arrived=where[arrived["pid"], arrived["tid"], arrived["ts"]],
                record=None,
            )
            for left, arrived in ((pair["s"], pair["f"]) for pair in ends.values())
        )
        lanes = tuple(
            Lane(
                instance=name,
                steps=tuple(found.get((pid, "step"), ())),
                attaches=tuple(found.get((pid, "attach"), ())),
                sends=tuple(found.get((pid, "send"), ())),
                receives=tuple(found.get((pid, "receive"), ())),
            )
            for pid, name in names.items()
        )
        began_s = datetime.fromisoformat(trace["otherData"]["began"]).timestamp()
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"expected the trace of an iteration, got {type(error).__name__}: {error}"
        ) from error
    length_s = max((one.end_s for one in where.values()), default=0.0)
    return Timeline(lanes=lanes, journeys=journeys, records={}, length_s=length_s, began_s=began_s)


def _read_interval(event: Event) -> Interval:
    args, begin_s = event["args"], float(event["ts"]) / 1e6
    end_s = begin_s + float(event["dur"]) / 1e6
    if not (0.0 <= begin_s <= end_s < math.inf):
        raise ValueError(f"an event from {begin_s} to {end_s} s")
    return Interval(
        begin_s=begin_s,
        end_s=end_s,
        num_samples=int(args.get("samples", 0)),
        num_tokens=int(args.get("tokens", 0)),
        context_tokens=int(args.get("context", 0)),
        move_id=str(args.get("move", "")),
        peer=str(args.get("peer", "")),
    )


_NAME = re.compile(r"iteration_(\d+)\.json\.gz")


def kept_iterations(run_dir: RunDir) -> list[int]:
    """Iterations whose traces are there, counted from 0, in order."""
    folder = run_dir.trace_file(0).parent
    names = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name[1]) for name in names if name is not None)


def write_kept_trace(run_dir: RunDir, number: int | None, out: Path | None) -> Path:
    """Write the trace of one iteration as JSON, and return where.

    Args:
        run_dir: of a run that lives or has ended.
        number: of the iteration, counted from 1 as the run prints it; None for the last.
        out: the file; None for one of the run's and the iteration's name in the current folder.

    Raises ConfigError for an iteration without one, StorageError when the file cannot be written.
    """
    iteration, text = kept_trace(run_dir, number)
    path = out or Path.cwd() / f"{run_dir.path.name}-iteration-{iteration + 1}.json"
    write_whole(path, text)
    return path


def kept_trace(run_dir: RunDir, number: int | None) -> tuple[int, bytes]:
    """An iteration (counted from 0) and its trace; `number` and errors as of `write_kept_trace`."""
    kept = kept_iterations(run_dir)
    iteration = number - 1 if number is not None else max(kept, default=-1)
    if iteration not in kept:
        have = f"{kept[0] + 1} to {kept[-1] + 1}" if kept else "none yet"
        which = f"iteration {number}" if number is not None else "any iteration"
        raise ConfigError(
            f"{run_dir.path} has no trace of {which}; it has {have}: the last {KEPT_TRACES} are kept"
        )
    kept_file = run_dir.trace_file(iteration)
    try:
        return iteration, gzip.decompress(kept_file.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{kept_file} cannot be read: {error}; choose another iteration") from error
