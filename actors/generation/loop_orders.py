"""What a decode loop is ordered to do, one record an order; their text stands in its log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.records import SampleKey, SampleRequest
from ...core.weight_records import WeightManifest
from ...policies.migration.move_messages import MoveEvent, describe

if TYPE_CHECKING:
    # they import torch, which the scheduler has no use for
    from ...engine.exchange import CachePiece
    from ..transport.broadcast import BroadcastGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOrder:
    """Take these samples, if they come from no scheduler that has been replaced."""

    requests: tuple[SampleRequest, ...]
    term: int = 0

    def __str__(self) -> str:
        names = ", ".join(f"{r.key.sample_index}@{r.epoch}" for r in self.requests)
        return f"submit {names}" + (f" in term {self.term}" if self.term else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOrder:
    """End these samples where they are, if the order comes from no scheduler that has been replaced."""

    keys: frozenset[SampleKey]
    term: int = 0

    def __str__(self) -> str:
        return f"cut {', '.join(map(str, sorted(key.sample_index for key in self.keys)))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """Load this version of this model; there must be no open sample."""

    manifest: WeightManifest
    chunks: tuple[np.ndarray, ...]
    group: BroadcastGroup | None = None
    "where the chunks come from instead; of the manifest only version, names and places hold then"

    def __str__(self) -> str:
        return f"load {self.manifest.model} version {self.manifest.weight_version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOrder:
    """Leave the loop at the next boundary."""

    def __str__(self) -> str:
        return "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOrder:
    """Answer what is held, and take no samples of an earlier term any more."""

    term: int

    def __str__(self) -> str:
        return f"hold for term {self.term}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogOrder:
    """Answer with the records of decode steps since the last such order."""

    def __str__(self) -> str:
        return "hand over the step log"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveEventOrder:
    """Something about a move: an order, a peer's message, an event of a transfer thread, a verdict."""

    event: MoveEvent
    term: int | None = None
    "of the scheduler that says it; None: it comes from a peer or a transfer thread"
    pieces: tuple[CachePiece, ...] = ()
    "of caches, that came beside a peer's message"

    def __str__(self) -> str:
        return describe(self.event)


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberOrder:
    """Look up in these responses too: token ids of prompt and response."""

    responses: tuple[tuple[np.ndarray, np.ndarray], ...]

    def __str__(self) -> str:
        return f"remember {len(self.responses)} responses"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOrder:
    """Answer with what a call returns, made between decode steps."""

    what: str
    call: Callable[[], Any]

    def __str__(self) -> str:
        return self.what


LoopOrder = (
    CallOrder
    | RememberOrder
    | SubmitOrder
    | CutOrder
    | LoadOrder
    | StopOrder
    | HoldOrder
    | StepLogOrder
    | MoveEventOrder
)
