"""The scheduler's table of instances: one row each from joining on; whatever else knows instances is a view of it.

States in order; a row never goes back, and its name is not used again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ...core.decode_records import GenerationStats, InstanceLoad
from ...core.records import SampleKey
from .open_samples import OpenSample

KEPT_GONE = 16
"Of the instances that are gone, the last ones are kept, for people and for what they have done."


class InstanceState(StrEnum):
    """Where an instance stands between its start and its end."""

    JOINING = "joining"
    "made, its first weights are on their way; the scheduler has not heard of it"
    SERVING = "serving"
    "takes samples"
    LEAVING = "leaving"
    "takes no more; what it has moves away or ends there"
    GONE = "gone"
    "died, was given up, or has left"


class Activity(StrEnum):
    """What an instance that serves does with its time (TLT, arXiv 2511.16665, section 4.1)."""

    BUSY = "busy"
    "has samples, or some are on their way to it"
    IDLE = "idle"
    TRAINING = "training"
    "has none, and trains a draft head meanwhile"


@dataclass(slots=True)
class Member:
    """An instance that has joined."""

    most_slots: int
    "offered when it joined"
    last_seen_s: float
    link: Any = None
    "how the shell reaches it: kept here, not looked at"
    state: InstanceState = InstanceState.SERVING
    owned: dict[SampleKey, OpenSample] = field(default_factory=dict)
    load: InstanceLoad | None = None
    "as told last"
    boundary: int = -1
    "step boundary it last told"
    boundary_since_s: float = 0.0
    leaves_because: str = ""
    activity: Activity = Activity.IDLE
    "as looked at last"
    since_s: float = 0.0
    "when that began"
    free_since_s: float | None = None
    "since when it has had no sample, training or not; None: it has some"
    is_training: bool = False
    "as told last"

    def looked_at_step(self, boundary: int, now_s: float) -> float:
        """Return for how many seconds it has told no other step boundary than this one."""
        if boundary != self.boundary:
            self.boundary, self.boundary_since_s = boundary, now_s
        return now_s - self.boundary_since_s

    def look(self, *, has_samples: bool, now_s: float) -> None:
        """Note what it does now, by what it owns and has told."""
        if not has_samples and self.free_since_s is None:
            self.free_since_s = now_s
        self.free_since_s = None if has_samples else self.free_since_s
        idle = Activity.TRAINING if self.is_training else Activity.IDLE
        activity = Activity.BUSY if has_samples else idle
        if activity is not self.activity:
            self.activity, self.since_s = activity, now_s

    @property
    def num_slots(self) -> int:
        """Slots that can be used now: its caches may have room for fewer samples than it has slots."""
        if self.load is None or self.load.num_slots is None:
            return self.most_slots
        return min(self.most_slots, self.load.num_slots)


class Members(dict[str, Member]):
    """Every instance that has joined, by name; of those that are gone, the last KEPT_GONE.

    What is asked with every event is kept beside the rows: a pool may have a thousand.
    """

    def __init__(self) -> None:
        super().__init__()
        self.serving: dict[str, Member] = {}
        "those that are heard: they take samples, or still have some"
        self.leaving: dict[str, Member] = {}
        "those that are to be emptied"

    def __setitem__(self, name: str, member: Member) -> None:
        super().__setitem__(name, member)
        self._sort()

    def change(self, name: str, state: InstanceState) -> None:
        """Let a row come to its next state."""
        self[name].state = state
        self._sort()

    def drop_gone(self) -> None:
        """Drop those among the gone that were heard of first."""
        gone = [name for name, member in self.items() if member.state is InstanceState.GONE]
        for name in sorted(gone, key=lambda name: self[name].last_seen_s)[:-KEPT_GONE]:
            del self[name]

    def _sort(self) -> None:
        heard = (InstanceState.SERVING, InstanceState.LEAVING)
        self.serving = {name: member for name, member in self.items() if member.state in heard}
        self.leaving = {n: member for n, member in self.serving.items() if member.state is heard[1]}

    @property
    def admitting(self) -> dict[str, Member]:
        """Those that take samples; where all leave, these: samples had better run than wait."""
        if not self.leaving:
            return self.serving
        return {n: member for n, member in self.serving.items() if n not in self.leaving} or self.serving

    @property
    def stats(self) -> dict[str, GenerationStats]:
        """What each has done, as told last; those that are gone included."""
        return {name: member.load.stats for name, member in self.items() if member.load is not None}
