"""What the instances did when, as a trace for ui.perfetto.dev (the Trace Event Format of Chrome).

An instance is a process with the threads `decode` (its decode steps, and the arrivals of moved samples that it takes in
between them), `send` and `receive`. Times are microseconds since the first decode step. An arrow goes from what a moved
sample left with, the transfer of its caches or else the last decode step at the source, to its arrival.
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

from ...actors.trace_events import TraceEvent
from ...core.errors import ConfigError
from ...core.files import write_whole
from ...policies.scheduling.events import MoveRecord
from ..folder.layout import KEPT_TRACES, RunDir

DECODE_THREAD = 1
_LEAST_US = 0.001
"No event is shorter: an empty one would enclose no end of an arrow."

Event = dict[str, Any]
Stretches = Sequence[tuple[float, float]]
"Begin and end, in seconds since the trace began."


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The events of one iteration, as the format has them; `cat` is the kind of a `TraceEvent`."""

    events: Sequence[Event]
    "names of processes and threads first, then everything else in order of time"
    began_s: float
    "wall clock"

    @property
    def instances(self) -> dict[int, str]:
        """Names by process."""
        return {one["pid"]: one["args"]["name"] for one in self.events if one["name"] == "process_name"}

    def lanes(self) -> dict[str, list[Event]]:
        """What each instance did, by its name."""
        names = self.instances
        lanes: dict[str, list[Event]] = {name: [] for name in names.values()}
        for one in self.events:
            if one["ph"] == "X":
                lanes[names[one["pid"]]].append(one)
        return lanes

    @property
    def moves(self) -> list[tuple[str, Event, Event]]:
        """Of every arrow: the move, what the sample left with, its arrival."""
        where = {(one["pid"], one["tid"], one["ts"]): one for one in self.events if one["ph"] == "X"}
        ends: dict[str, dict[str, Event]] = {}
        for one in self.events:
            if one["ph"] in ("s", "f"):
                move_id = one["name"].removeprefix("move ")
                ends.setdefault(move_id, {})[one["ph"]] = where[one["pid"], one["tid"], one["ts"]]
        return [(move_id, pair["s"], pair["f"]) for move_id, pair in ends.items()]

    @property
    def length_s(self) -> float:
        """Seconds to the end of the last event."""
        return max((end_s(one) for one in self.events if one["ph"] == "X"), default=0.0)

    def text(self, iteration: int) -> str:
        """As one JSON object; the iteration counts from 0."""
        title = (
            f"generation of iteration {iteration + 1}: {self.length_s:.1f} s, {len(self.moves)} samples moved"
        )
        began = datetime.fromtimestamp(self.began_s, tz=UTC).isoformat()
        other = {"title": title, "began": began}
        return json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms", "otherData": other})


def end_s(event: Event) -> float:
    """When an event ended."""
    return (event["ts"] + event["dur"]) / 1e6


def stretches(lane: Sequence[Event], *kinds: str) -> Stretches:
    """When events of some kinds were."""
    return [(one["ts"] / 1e6, end_s(one)) for one in lane if one["cat"] in kinds]


def make_trace(spans: Mapping[str, Sequence[TraceEvent]], moves: Sequence[MoveRecord] = ()) -> Trace:
    """Arrange what `take_spans` gave, by instance, and the moves that the scheduler reported."""
    # a transfer that failed before its first frame has no beginning of its own
    began_s = min(
        (one.begin_s for some in spans.values() for one in some if one.kind != "receive"), default=0.0
    )
    records = {record.order.move_id: record for record in moves}
    names: list[Event] = []
    events: list[Event] = []
    pids = {instance: pid for pid, instance in enumerate(sorted(spans, key=_by_number), start=1)}
    for instance, pid in pids.items():
        names += _named(pid, 0, "process", instance)
        since = [
            replace(one, begin_s=max(one.begin_s - began_s, 0.0), end_s=max(one.end_s - began_s, 0.0))
            for one in spans[instance]
        ]
        for tid, (thread, row) in enumerate(_threads(since), start=DECODE_THREAD):
            names += _named(pid, tid, "thread", thread)
            events += [_event(one, pid, tid, records) for one in row]
    events += _arrows(events, pids, records)
    return Trace(events=names + sorted(events, key=lambda one: one["ts"]), began_s=began_s)


def _by_number(instance: str) -> list[tuple[int, int | str]]:
    """gen-2 comes before gen-10, and a replacement behind what it replaces."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in instance.split("-")]


def _named(pid: int, tid: int, what: str, name: str) -> list[Event]:
    place = {"ph": "M", "pid": pid, "tid": tid}
    order = {"sort_index": pid if what == "process" else tid}
    return [
        {"name": f"{what}_name", "args": {"name": name}} | place,
        {"name": f"{what}_sort_index", "args": order} | place,
    ]


def _threads(spans: Sequence[TraceEvent]) -> Iterator[tuple[str, Sequence[TraceEvent]]]:
    """Transfers with several peers may overlap, the events of one thread may not: further ones share the load."""
    steps, attaches, sends, receives = (
        _one_after_the_other(one for one in spans if one.kind == kind)
        for kind in ("step", "attach", "send", "receive")
    )
    yield "decode", sorted([*steps, *attaches], key=lambda one: one.begin_s)
    for name, transfers in (("send", sends), ("receive", receives)):
        rows: list[list[TraceEvent]] = []
        for one in transfers:
            free = next((row for row in rows if row[-1].end_s <= one.begin_s), None)
            rows.append([one]) if free is None else free.append(one)
        for number, row in enumerate(rows or [[]], start=1):
            yield (name if number == 1 else f"{name} {number}"), row


def _one_after_the_other(spans: Iterable[TraceEvent]) -> list[TraceEvent]:
    """What one thread did (there is one for each kind and peer): nothing begins before the last has ended."""
    busy_until_s: dict[str, float] = {}
    ordered = []
    for one in sorted(spans, key=lambda one: one.end_s):
        peer = _peer(one)
        ordered.append(replace(one, begin_s=max(one.begin_s, busy_until_s.get(peer, 0.0))))
        busy_until_s[peer] = one.end_s
    return sorted(ordered, key=lambda one: one.begin_s)


def _peer(span: TraceEvent) -> str:
    """Labels read `MOVE`, `MOVE to PEER` or `MOVE from PEER`."""
    return span.label.partition(" ")[2].partition(" ")[2]


def _event(span: TraceEvent, pid: int, tid: int, records: Mapping[str, MoveRecord]) -> Event:
    begin_us = round(span.begin_s * 1e6, 3)
    if span.kind == "step":
        # the viewer colours by name: batches of unlike size look unlike
        name = f"step of {span.num_samples}"
        args = {"samples": span.num_samples, "tokens": span.num_tokens, "context": span.context_tokens}
    else:
        move_id = span.label.partition(" ")[0]
        name, args = f"{span.kind} {move_id}", _of_move(move_id, _peer(span), records.get(move_id))
    return {
        "name": name,
        "cat": span.kind,
        "ph": "X",
        "ts": begin_us,
        # from rounded ends, so that what follows at once does not overlap
        "dur": max(round(round(span.end_s * 1e6, 3) - begin_us, 3), _LEAST_US),
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _of_move(move_id: str, peer: str, record: MoveRecord | None) -> dict[str, Any]:
    args: dict[str, Any] = {"move": move_id} | ({"peer": peer} if peer else {})
    if record is None:
        return args
    return args | {
        "sample": record.order.key.sample_index,
        "mode": str(record.order.mode),
        "outcome": record.outcome,
        "why_ordered": record.why_ordered,
        "why_ended": record.why_ended,
        "predicted_gain_s": record.gain_s,
        **record.metrics,
    }


def _arrows(
    events: Sequence[Event], pids: Mapping[str, int], records: Mapping[str, MoveRecord]
) -> Iterator[Event]:
    """Both ends, each within the event it belongs to; none where clocks of two machines contradict the move."""
    sends = {one["args"]["move"]: one for one in events if one["cat"] == "send"}
    steps: dict[int | None, list[Event]] = {}
    for one in events:
        if one["cat"] == "step":
            steps.setdefault(one["pid"], []).append(one)
    for number, arrived in enumerate((one for one in events if one["cat"] == "attach"), start=1):
        move_id = arrived["args"]["move"]
        left = sends.get(move_id)
        if left is None and move_id in records:
            at_source = steps.get(pids.get(records[move_id].order.source), [])
            count = bisect_right(at_source, arrived["ts"] / 1e6 + 1e-9, key=end_s)
            left = at_source[count - 1] if count else None
        if left is None or arrived["ts"] < left["ts"]:
            continue
        arrow = {"name": f"move {move_id}", "cat": "move", "id": number}
        yield arrow | {"ph": "s"} | {key: left[key] for key in ("ts", "pid", "tid")}
        # without `bp` an arrow ends at the next event, not at the one that encloses it
        yield arrow | {"ph": "f", "bp": "e"} | {key: arrived[key] for key in ("ts", "pid", "tid")}


def merge(parts: Stretches, *, gap_s: float = 0.0) -> Stretches:
    """What the parts cover together; gaps up to `gap_s` are covered over."""
    covered: list[tuple[float, float]] = []
    for begin, end in sorted(parts):
        if covered and begin <= covered[-1][1] + gap_s:
            covered[-1] = (covered[-1][0], max(covered[-1][1], end))
        else:
            covered.append((begin, end))
    return covered


def overlap_s(parts: Stretches, others: Stretches) -> float:
    """Seconds of the parts, each counted by itself, during which at least one of the others lasts."""
    covered = [pair for pair in merge(others) if pair[1] > pair[0]]
    if not covered or not parts:
        return 0.0
    edges = np.array(covered).ravel()
    # covered seconds before each edge: they grow within a pair and stand still between pairs
    before = np.concatenate([[0.0], np.cumsum(np.diff(edges) * (np.arange(len(edges) - 1) % 2 == 0))])
    return float(np.diff(np.interp(np.array(parts), edges, before), axis=1).sum())


def read_trace(text: bytes) -> Trace:
    """What `Trace.text` gave. Raises ConfigError for anything else."""
    try:
        tree = json.loads(text)
        trace = Trace(
            events=tree["traceEvents"], began_s=datetime.fromisoformat(tree["otherData"]["began"]).timestamp()
        )
        for event in (one for lane in trace.lanes().values() for one in lane):
            args, begin, duration = event["args"], event["ts"], event["dur"]
            counts = (args["samples"], args["tokens"]) if event["cat"] == "step" else ()
            if not 0.0 <= begin <= begin + duration < math.inf or any(count < 0 for count in counts):
                raise ValueError(f"an event of {begin} and {duration} us, {args}")
        _ = trace.moves
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"expected the trace of an iteration, got {type(error).__name__}: {error}"
        ) from error
    return trace


def kept_iterations(run_dir: RunDir) -> list[int]:
    """Iterations whose traces are there, counted from 0, in order."""
    folder = run_dir.trace_file(0).parent
    names = [re.fullmatch(r"iteration_(\d+)\.json\.gz", path.name) for path in folder.glob("*")]
    return sorted(int(name[1]) for name in names if name is not None)


def kept_trace(run_dir: RunDir, number: int | None) -> tuple[int, bytes]:
    """An iteration (counted from 0) and the text of its trace.

    `number` counts from 1, as the run prints it; None for the last. Raises ConfigError for one that is not kept.
    """
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


def write_kept_trace(run_dir: RunDir, number: int | None, out: Path | None) -> Path:
    """Write the trace of `kept_trace` as JSON, by default into the current folder, and return where.

    Raises as `kept_trace`, and StorageError.
    """
    iteration, text = kept_trace(run_dir, number)
    path = out or Path.cwd() / f"{run_dir.path.name}-iteration-{iteration + 1}.json"
    write_whole(path, text)
    return path
