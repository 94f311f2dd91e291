"""The scheduler's table of instances and its moves as people read them (`rlhfspec status`, `diagnose`)."""

from __future__ import annotations

from rlhfspec.actors.actor_messages import InstanceView, MoveView
from rlhfspec.policies.scheduling.events import MoveRecord
from rlhfspec.policies.scheduling.members import Members


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


def move_view(record: MoveRecord, *, ended_at: float) -> MoveView:
    """A line of what was moved, why, and how it ended."""
    order = record.order
    why = f"; {record.why_ended}" if record.why_ended else ""
    return MoveView(
        ended_at=ended_at,
        text=f"sample {order.key.sample_index} from {order.source} to {order.destination} ({order.mode}): "
        f"{record.outcome}{why}; ordered because {record.why_ordered}",
    )
