"""What the scheduler tells the loop, people (`rlhfspec status`) and the node's metrics port."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...core.records import Completion
from ...policies.scaling.scaling_records import Resize
from ...policies.scheduling.events import Alarm, Left, MoveRecord
from ...policies.scheduling.members import Members
from ...policies.scheduling.scheduler import Scheduler
from ..actor_messages import InstanceView, LostInstance, Taken
from ..remote import run_metrics


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

    def is_urgent(self, gathers: bool) -> bool:
        """Whether the loop is waiting for any of it; where it gathers completions they can wait."""
        return bool(self.lost or self.left or (self.completions and not gathers))

    def taken(self, *, planning_s: float, machine: Scheduler) -> Taken:
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
            num_open=machine.num_open,
            attempts=machine.attempt_counts,
            proving_cost=0.0 if machine.look_ahead is None else machine.look_ahead.proving_cost,
            stats=machine.members.stats,
        )


def count_move(record: MoveRecord) -> None:
    """Count one move that has ended, its bytes by stage, and how long the sample stood still."""
    mode, metrics = str(record.order.mode), record.metrics
    run_metrics.add("moves", outcome=str(record.outcome), mode=mode)
    for stage in ("stage1", "stage2"):
        run_metrics.add("moved_bytes", metrics.get(f"{stage}_bytes", 0.0), stage=stage)
    if "downtime_s" in metrics:
        # clocks of two machines may differ by more than a sample stood still
        run_metrics.observe("move_downtime_seconds", max(metrics["downtime_s"], 0.0), mode=mode)


def instance_views(members: Members, *, now_s: float) -> tuple[InstanceView, ...]:
    """A row each, in the order of joining; `now_s` of the clock that `last_seen_s` is of."""
    return tuple(
        InstanceView(
            instance=name,
            state=str(member.state),
            num_owned=len(member.owned),
            num_slots=member.num_slots,
            silent_s=max(0.0, now_s - member.last_seen_s),
            activity=str(member.activity),
            activity_s=max(0.0, now_s - member.since_s),
            load=member.load,
        )
        for name, member in members.items()
    )
