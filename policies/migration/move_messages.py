"""What source, destination and scheduler say to each other about one move."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ...core.records import SampleKey
from ...core.sample_state import SampleState
from ..reallocation.pool_records import MoveMode


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOrder:
    """The scheduler's order: this sample goes from here to there."""

    move_id: str
    "unique in the run"
    key: SampleKey
    epoch: int
    "under which the source owns it; the destination will own it under the next one"
    source: str
    destination: str
    mode: MoveMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Source to destination: keep a slot; so many tokens will come."""

    order: MoveOrder
    weight_version: int
    drafter_version: int
    most_tokens: int
    "prompt and longest response"
    cached_tokens: dict[str, int]
    "tokens to be shipped in stage one, by cache; empty when nothing is shipped"
    token_bytes: dict[str, int]
    frame_bytes: int
    "about so many bytes a frame: both sides cut alike"
    channel: str = ""
    "the source's open channel to the destination, if any"
    broken_channel: str = ""
    "the one that failed last at the source: of no use any more"

    @property
    def move_id(self) -> str:
        """The move's name."""
        return self.order.move_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Destination to source: a slot is kept; ship through this channel."""

    move_id: str
    ticket: Any = None
    "None: the channel named in Prepare is still good"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Destination to source: I do not take it. The source keeps the sample."""

    move_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """Destination to source: every frame of stage one has arrived and is whole."""

    move_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """Source to destination: the sample is yours as of its last token here.

    What its caches got since stage one travels beside this record.
    """

    order: MoveOrder
    state: SampleState
    drafter_version: int
    left_at_s: float
    "wall clock at the end of the source's last decode step with it"
    num_stage1_bytes: int = 0

    @property
    def move_id(self) -> str:
        """The move's name."""
        return self.order.move_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Source to destination: the sample stays or has finished here; forget the move."""

    move_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """The source's transfer thread has sent every frame, or failed."""

    move_id: str
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """The destination's transfer thread has received every frame whole, or failed."""

    move_id: str
    error: str = ""


PeerMessage = Prepare | Ready | Refused | Landed | HandOver | Cancel
"From one instance to another."


class Verdict(StrEnum):
    """What an instance is to do with its copy of a sample that was handed over."""

    OWN = "own"
    "go on with it, under the epoch given"
    RELEASE = "release"
    "it is another's: forget it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Scheduler to source or destination: who has the sample."""

    move_id: str
    key: SampleKey
    verdict: Verdict
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOff:
    """Scheduler to source: the destination is gone; keep the sample, or ask for it back."""

    move_id: str
    reason: str


class MoveOutcome(StrEnum):
    """How a move ended."""

    MOVED = "moved"
    KEPT = "kept"
    "the sample never left its source"
    TAKEN_BACK = "taken back"
    LOST = "lost"
    "an instance died, or nothing was heard of it"


class Claim(StrEnum):
    """What an instance reports of a move to the scheduler."""

    COMMIT = "commit"
    "destination: the sample runs here"
    TAKE_BACK = "take back"
    "source: it was handed over, and no verdict came"
    KEPT = "kept"
    "source: it never left, and runs (or ran to its end) here"
    LOST = "lost"
    "the copy here is useless, for instance because the weights have changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReport:
    """An instance to the scheduler. Given again until acknowledged, like a completion."""

    claim: Claim
    move_id: str
    key: SampleKey
    epoch: int
    "COMMIT: the epoch claimed; else the one the source held"
    source: str
    destination: str
    reason: str = ""
    metrics: dict[str, float] | None = None
    "what the move cost, as `actors.migration` measured it"


MoveEvent = MoveOrder | PeerMessage | Shipped | Received | Settle | CallOff
"What reaches an instance's decode loop about moves."


def describe(event: MoveEvent) -> str:
    """One line for the log of orders."""
    parts = [type(event).__name__.lower(), "of move", event.move_id]
    if isinstance(event, MoveOrder):
        parts += [f"sample {event.key.sample_index}@{event.epoch}", f"to {event.destination} by {event.mode}"]
    elif isinstance(event, Settle):
        parts += [f"{event.verdict} sample {event.key.sample_index}@{event.epoch}"]
    reason = getattr(event, "reason", "") or getattr(event, "error", "")
    return " ".join(parts) + (f": {reason}" if reason else "")
