"""What the scheduler is told (events) and what it says (orders).

An event is a fact with its time as an argument; an order is something the shell around the machine
carries out. Equal events in equal order give equal orders: a log of events replays a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.decode_records import InstanceLoad
from ...core.records import Completion, SampleKey, SampleRequest
from ..migration.move_messages import CallOff, MoveOrder, MoveOutcome, MoveReport, Settle
from ..scaling.scaling_records import Resize


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesArrived:
    """New samples to generate; each key arrives once in the life of a scheduler."""

    requests: tuple[SampleRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptsArrived:
    """The next batch's samples, which may be begun under the weights that there are; once this batch was asked for.

    It takes the place of what was announced before.
    """

    requests: tuple[SampleRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptsEnd:
    """New weights are published: instances end their attempts, and nothing more is begun of this batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceJoined:
    """An instance with loaded weights offers `num_slots` running samples."""

    instance: str
    num_slots: int
    now_s: float
    link: Any = None
    "how the shell reaches it: the machine keeps it in its table and does not look at it"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReported:
    """An instance answered a poll: what finished, and how far the others are."""

    instance: str
    now_s: float
    completions: tuple[Completion, ...] = ()
    progress: Mapping[SampleKey, int] = field(default_factory=dict)
    "number of response tokens so far of running samples"
    load: InstanceLoad | None = None
    moves: tuple[MoveReport, ...] = ()
    "what it says of moves, in order, before its completions"
    boundary: int = 0
    "number of its last step boundary"
    is_training: bool = False
    "whether it trains a draft head, having no sample"
    busy_s: float = 0.0
    "seconds its decode step now running has taken, by its own clock; 0 between steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGone:
    """An instance died, or is taken for dead."""

    instance: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLeaves:
    """An instance is to be emptied and let go."""

    instance: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockTicked:
    """Time passed: instances that have been silent for too long are given up."""

    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Samples are to end where they are: new weights are there, or nobody waits for them any more."""

    keys: frozenset[SampleKey] | None = None
    "None: all, those too that arrive until none is open"


Event = (
    SamplesArrived
    | AttemptsArrived
    | AttemptsEnd
    | InstanceJoined
    | InstanceReported
    | InstanceGone
    | InstanceLeaves
    | ClockTicked
    | Cut
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Give these samples to the instance; every request carries its epoch."""

    instance: str
    requests: tuple[SampleRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOwned:
    """Have an instance end these samples where they are, and no others: the order may come late."""

    instance: str
    keys: frozenset[SampleKey]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """Hand this accepted completion on; it is given exactly once per sample."""

    completion: Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """The instance is out: end it, and make a replacement if there may be one."""

    instance: str
    reason: str
    num_requeued: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A leaving instance holds nothing any more: end it."""

    instance: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """The pool is to have another size; who is to leave is leaving already."""

    change: Resize


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Two reports of one sample differ, or a report came from where it cannot come from."""

    key: SampleKey
    instance: str
    epoch: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMove:
    """Tell the source to move a sample."""

    order: MoveOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class SendVerdict:
    """Tell an instance what to do with its copy of a sample."""

    instance: str
    verdict: Settle | CallOff


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveEnded:
    """A move is over; for metrics and the timeline."""

    record: MoveRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRecord:
    """One move from order to end."""

    order: MoveOrder
    outcome: MoveOutcome
    why_ordered: str
    why_ended: str
    gain_s: float
    "predicted"
    ordered_s: float
    ended_s: float
    metrics: dict[str, float]
    "what the instances measured: bytes, seconds by stage, downtime"


Order = Submit | CutOwned | Deliver | Abandon | Left | Resized | Alarm | StartMove | SendVerdict | MoveEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSnapshot:
    """What a living instance holds, for a scheduler that starts again."""

    instance: str
    num_slots: int
    open_epochs: Mapping[SampleKey, int]
    "samples accepted and not yet reported, with the epoch of their order"
    completions: tuple[Completion, ...] = ()
    "finished, not yet acknowledged"
    set_aside: Mapping[SampleKey, tuple[str, int]] = field(default_factory=dict)
    "handed over and not settled: the move and the epoch before it"
    link: Any = None
    "how the shell reaches it"
