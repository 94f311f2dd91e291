"""What an instance did when: decode steps, transfers, arrivals; a ring that any thread may append to."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

MAX_EVENTS = 50_000

TraceKind = Literal["step", "send", "receive", "attach"]


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One stretch of time, in seconds of the wall clock: processes of one machine agree on it."""

    kind: TraceKind
    begin_s: float
    end_s: float
    label: str = ""
    num_samples: int = 0
    "of a decode step"
    num_tokens: int = 0
    "emitted by a decode step"
    context_tokens: int = 0
    "of its samples, before it"


class TraceLog:
    """The last spans of one instance."""

    def __init__(self) -> None:
        self._spans: deque[TraceEvent] = deque(maxlen=MAX_EVENTS)
        self._wall_offset_s = time.time() - time.monotonic()

    def add(
        self,
        kind: TraceKind,
        begin_s: float,
        end_s: float,
        label: str = "",
        *,
        num_samples: int = 0,
        num_tokens: int = 0,
        context_tokens: int = 0,
    ) -> None:
        """Note a stretch of the monotonic clock."""
        begin_s, end_s = begin_s + self._wall_offset_s, end_s + self._wall_offset_s
        self._spans.append(TraceEvent(kind, begin_s, end_s, label, num_samples, num_tokens, context_tokens))

    def take(self) -> list[TraceEvent]:
        """Return what has been noted since the last call."""
        taken: list[TraceEvent] = []
        while self._spans:
            taken.append(self._spans.popleft())
        return taken
