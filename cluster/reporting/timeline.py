"""What the instances did when: spans and move records become lanes of intervals, and journeys between lanes.

A lane is one instance: its decode steps, the arrivals that its decode thread took in between them, and the transfers
of its other threads. A journey is one sample's way from a lane to another. Seconds count from the first decode step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhfspec.actors.generation.trace_events import TraceEvent, TraceKind
from rlhfspec.policies.scheduling.events import MoveRecord


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
