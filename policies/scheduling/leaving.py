"""Instances that leave: their samples move to where there is room, and who has none left is let go.

Nothing is lost where there is no room, no migration or no time: samples end where they are, or are queued again when
the instance dies, to the same tokens.
"""

from __future__ import annotations

from ..reallocation.pool_records import Move, MoveMode
from .events import Left, Order
from .ledger import Ledger
from .members import InstanceState


def moves_away(ledger: Ledger) -> list[Move]:
    """A move for each sample of a leaving instance for which another has a free slot, to the emptiest; oldest first."""
    admitting, moves = ledger.members.admitting, ledger.moves
    if not ledger.members.leaving or admitting.keys() <= ledger.members.leaving.keys():
        return []
    room = {
        name: member.num_slots - len(member.owned) - moves.num_arriving(name)
        for name, member in admitting.items()
    }
    away: list[Move] = []
    for source, member in sorted(ledger.members.leaving.items()):
        keys = sorted(
            (key for key in member.owned if key not in moves), key=lambda key: ledger.samples[key].arrival
        )
        for key in keys:
            destination = take_emptiest(room)
            if destination is None:
                return away
            has_begun = ledger.samples[key].num_tokens > 0
            away.append(
                Move(
                    key=key,
                    source=source,
                    destination=destination,
                    mode=MoveMode.MIGRATE if has_begun else MoveMode.RECOMPUTE,
                    gain_s=0.0,
                    reason=f"{source} leaves: {member.leaves_because}",
                )
            )
    return away


def take_emptiest(room: dict[str, int]) -> str | None:
    """Take a free slot of the instance that has most of them, the first by name of several; None: nobody has one."""
    emptiest = max(sorted(room), key=lambda name: room[name], default=None)
    if emptiest is None or room[emptiest] <= 0:
        return None
    room[emptiest] -= 1
    return emptiest


def let_go(ledger: Ledger) -> list[Order]:
    """End the rows of leaving instances that hold nothing and that no move concerns; the last one waits for another."""
    orders: list[Order] = []
    if not ledger.members.leaving or ledger.members.admitting.keys() <= ledger.members.leaving.keys():
        return orders
    for name, member in sorted(ledger.members.leaving.items()):
        if not member.owned and not ledger.moves.touching(name):
            ledger.members.change(name, InstanceState.GONE)
            orders.append(Left(instance=name, reason=member.leaves_because))
    return orders
