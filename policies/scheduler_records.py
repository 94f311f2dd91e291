"""What the scheduler is told (events) and what it says (orders).

An event is a fact with its time as an argument; an order is something the shell around the machine
carries out. Equal events in equal order give equal orders: a log of events replays a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from core.records import Completion, InstanceLoad, SampleKey, SampleRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesArrived:
    """New samples to generate; each key arrives once in the life of a scheduler."""

    requests: tuple[SampleRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceJoined:
    """An instance with loaded weights offers `num_slots` running samples."""

    instance: str
    num_slots: int
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReported:
    """An instance answered a poll: what finished, and how far the others are."""

    instance: str
    now_s: float
    completions: tuple[Completion, ...] = ()
    progress: Mapping[SampleKey, np.ndarray] = field(default_factory=dict)
    "response tokens so far of running samples, [T] each"
    load: InstanceLoad | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGone:
    """An instance died, or is taken for dead."""

    instance: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockTicked:
    """Time passed: instances that have been silent for too long are given up."""

    now_s: float


Event = SamplesArrived | InstanceJoined | InstanceReported | InstanceGone | ClockTicked


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Give these samples to the instance; every request carries its epoch."""

    instance: str
    requests: tuple[SampleRequest, ...]


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
class Alarm:
    """Two reports of one sample differ, or a report came from where it cannot come from."""

    key: SampleKey
    instance: str
    epoch: int
    what: str


Order = Submit | Deliver | Abandon | Alarm


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSnapshot:
    """What a living instance holds, for a scheduler that starts again."""

    instance: str
    num_slots: int
    open_epochs: Mapping[SampleKey, int]
    "samples accepted and not yet reported, with the epoch of their order"
    completions: tuple[Completion, ...] = ()
    "finished, not yet acknowledged"
