"""The scheduler's table of instances as people read it (`rlhfspec status`)."""

from __future__ import annotations

from actors.actor_messages import InstanceSight
from policies.scheduling.members import Members


def instance_sights(members: Members, *, now_s: float) -> tuple[InstanceSight, ...]:
    """A row each, in the order of joining; `now_s` of the clock that `last_seen_s` is of."""
    return tuple(
        InstanceSight(
            instance=name,
            state=str(member.state),
            num_owned=len(member.owned),
            num_slots=member.num_slots,
            silent_s=max(0.0, now_s - member.last_seen_s),
            load=member.load,
        )
        for name, member in members.items()
    )
