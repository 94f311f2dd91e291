"""What the scheduler has to tell the loop since it was last asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhfspec.actors.actor_messages import LostInstance, Taken
from rlhfspec.core.decode_records import GenerationStats
from rlhfspec.core.records import Completion
from rlhfspec.policies.scaling.scaling_records import Resize
from rlhfspec.policies.scheduling.events import Alarm, Left, MoveRecord


@dataclass(slots=True)
class SchedulerUpdates:
    """Gathered by the scheduler under its lock."""

    completions: list[Completion] = field(default_factory=list)
    lost: list[LostInstance] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    resized: Resize | None = None
    moves: list[MoveRecord] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    drafter_alarms: list[str] = field(default_factory=list)

    @property
    def is_urgent(self) -> bool:
        """Whether the loop is waiting for any of it."""
        return bool(self.completions or self.lost or self.left)

    def taken(self, *, planning_s: float, num_open: int, stats: Mapping[str, GenerationStats]) -> Taken:
        """All of it, beside how things stand."""
        return Taken(
            completions=tuple(self.completions),
            lost=tuple(self.lost),
            left=tuple(self.left),
            resized=self.resized,
            alarms=tuple(self.alarms),
            drafter_alarms=tuple(self.drafter_alarms),
            moves=tuple(self.moves),
            planning_s=planning_s,
            num_open=num_open,
            stats=stats,
        )
