"""Faults at chosen moments of a run: while a phase goes on beside an update, or just before an update begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray

from rlhfspec.actors.trace_events import TraceEvent
from rlhfspec.cluster.run.recorder import Recorder
from rlhfspec.cluster.run.stream import RolloutStream
from rlhfspec.cluster.run.update import Update
from rlhfspec.cluster.system.system import System


def before_updates(monkeypatch: pytest.MonkeyPatch, strike: Callable[[System], Any]) -> None:
    """Call `strike` when a batch is whole, before it is learned from."""
    really = Update._begin

    def begin(update: Update) -> None:
        strike(update._system)
        really(update)

    monkeypatch.setattr(Update, "_begin", begin)


def beside_updates(monkeypatch: pytest.MonkeyPatch, look: Callable[[Update, System], Any]) -> None:
    """Call `look` all along the phases that an update is beside."""
    really = Update.look

    def looks(update: Update) -> None:
        really(update)
        look(update, update._system)

    monkeypatch.setattr(Update, "look", looks)


@dataclass
class Turns:
    """Who computed when, of a run in turns: every decode step of the instances, and the trainer's forwards."""

    steps: list[TraceEvent] = field(default_factory=list)
    updates: list[tuple[float, float]] = field(default_factory=list)
    "seconds of the wall clock at which each began and was over"
    forwards: list[tuple[int, int, int]] = field(default_factory=list)
    "of each update: made when its phase began, when it began itself, when it was over"


def watch_turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """Count from now on, of systems with one trainer."""
    turns, phases = Turns(), [0]
    begin, end, take = Update._begin, Update._end, Recorder._take_spans
    phase = RolloutStream.phase

    def forwards(system: System) -> int:
        return ray.get(system.trainers.first.forwards_so_far.remote())

    def begins_phase(stream: RolloutStream, *args: Any, **kwargs: Any) -> Any:
        phases.append(forwards(stream._system))
        return phase(stream, *args, **kwargs)

    def begins(update: Update) -> None:
        turns.forwards.append((phases[-1], forwards(update._system), 0))
        turns.updates.append((time.time(), 0.0))
        begin(update)

    def ends(update: Update, **kwargs: Any) -> None:
        end(update, **kwargs)
        turns.updates[-1] = (turns.updates[-1][0], time.time())
        turns.forwards[-1] = (*turns.forwards[-1][:2], forwards(update._system))

    def takes(recorder: Recorder, instances: Any) -> dict[str, list[TraceEvent]]:
        spans = take(recorder, instances)
        turns.steps += [span for each in spans.values() for span in each if span.kind == "step"]
        return spans

    monkeypatch.setattr(RolloutStream, "phase", begins_phase)
    monkeypatch.setattr(Update, "_begin", begins)
    monkeypatch.setattr(Update, "_end", ends)
    monkeypatch.setattr(Recorder, "_take_spans", takes)
    return turns
