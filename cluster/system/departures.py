"""Instances that have been emptied: what they still have to tell is fetched, then they are ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from rlhfspec.actors.generation.trace_events import TraceEvent
from rlhfspec.actors.waiting.remote import Handle
from rlhfspec.actors.waiting.waiting import get
from rlhfspec.core.errors import RlhfSpecError

GRACE_S = 5.0
"For an instance's last words."


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """What an instance did since it was last asked."""

    spans: list[TraceEvent]
    steps: bytes
    "its step log as a file; empty without one"


@dataclass(frozen=True, slots=True)
class _Departing:
    name: str
    handle: Handle
    refs: list[Any]
    ends_s: float
    then: Callable[[], None]


class Departures:
    """Of one pool."""

    def __init__(self) -> None:
        self._departing: list[_Departing] = []
        self._told: dict[str, LastWords] = {}

    def begin(self, name: str, handle: Handle, then: Callable[[], None]) -> None:
        """Ask for its last words and to leave its loop; `then` is called when it has been ended."""
        refs = [handle.take_spans.remote(), handle.take_step_log.remote(GRACE_S), handle.stop.remote(GRACE_S)]
        self._departing.append(_Departing(name, handle, refs, time.monotonic() + GRACE_S, then))

    def look(self) -> None:
        """End those that have answered, or have had their time."""
        for one in list(self._departing):
            ready = ray.wait(one.refs, num_returns=len(one.refs), timeout=0)[0]
            if len(ready) < len(one.refs) and time.monotonic() < one.ends_s:
                continue
            self._departing.remove(one)
            try:
                spans, steps = get(
                    one.refs[:2],
                    waiter="the loop",
                    waited_for=one.name,
                    order="say its last words",
                    timeout_s=0.0,
                )
                self._told[one.name] = LastWords(spans=spans, steps=steps)
            except RlhfSpecError:
                # a picture and a log, not worth a wait: it may have died meanwhile
                pass
            ray.kill(one.handle)
            one.then()

    def take(self) -> dict[str, LastWords]:
        """The last words since the last call, by instance."""
        told, self._told = self._told, {}
        return told
