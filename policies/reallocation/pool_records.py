"""What a reallocation policy is shown, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from ...core.records import SampleKey


class MoveMode(StrEnum):
    """How a sample's caches get to its new instance."""

    MIGRATE = "migrate"
    "they are shipped while the source keeps decoding (design 3.4)"
    RECOMPUTE = "recompute"
    "the destination computes them from the committed tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """One instance as the last poll saw it. Arrays are [B] over its running samples that may be moved."""

    instance: str
    num_slots: int
    keys: tuple[SampleKey, ...]
    response_tokens: np.ndarray
    "tokens of each response so far; 0 where it has not begun"
    context_tokens: np.ndarray
    "prompt and response"
    num_arriving: int = 0
    "samples on their way here; their slots are reserved"
    num_leaving: int = 0
    "samples on their way out or otherwise not to be moved; they still run here"
    goodput_tokens_per_s: float = 0.0
    "emitted tokens per second of late; 0 when unknown"
    goodput_samples: float = 0.0
    "samples that ran meanwhile, in the mean"
    idle_s: float = 0.0
    "seconds for which it has had no sample"
    is_leaving: bool = False
    "takes no samples any more; it has no slots to give"

    @property
    def num_running(self) -> int:
        """Samples that run here now."""
        return len(self.keys) + self.num_leaving

    @property
    def num_free_slots(self) -> int:
        """Samples that could still come here."""
        return self.num_slots - self.num_running - self.num_arriving


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """The whole pool at one moment."""

    now_s: float
    instances: tuple[InstanceView, ...]
    num_queued: int
    "samples that no instance has yet"
    max_new_tokens: int
    "no response is longer"
    warm_pairs: frozenset[tuple[str, str]] = frozenset()
    "(source, destination) whose channel is open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One sample to be moved."""

    key: SampleKey
    source: str
    destination: str
    mode: MoveMode
    gain_s: float
    "predicted seconds by which the pool finishes earlier"
    reason: str


class ReallocationPolicy(Protocol):
    """Pure: equal views and lengths in, equal moves out; no clock, no hidden randomness."""

    def plan(self, view: PoolView) -> tuple[Move, ...]:
        """Return the moves to order now; no sample twice, never more than a destination has free slots."""
        ...

    def note_finished(self, num_response_tokens: int) -> None:
        """A response ended with so many tokens."""
        ...

    def note_transfer(self, *, num_bytes: int, seconds: float, cold: bool) -> None:
        """A migration's caches took so long from order to arrival; `cold` when the channel had to be opened."""
        ...

    def note_prefill(self, *, num_tokens: int, seconds: float) -> None:
        """An instance computed the caches of so many tokens in so many seconds."""
        ...
