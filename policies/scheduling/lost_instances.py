"""When an instance counts as lost, and what becomes of its samples: they start anew, under epochs of their own."""

from __future__ import annotations

from ..migration.move_messages import CallOff, MoveOutcome
from .events import Abandon, InstanceReported, Order, SendVerdict
from .ledger import Ledger, verdict_for
from .members import InstanceState
from .ownership import TAKEN_BACK_EPOCHS


def lose_silent(ledger: Ledger, *, timeout_s: float) -> list[Order]:
    """Give up the instances that have not been heard of for so long."""
    orders: list[Order] = []
    for name, member in sorted(ledger.members.serving.items()):
        silent_s = ledger.now_s - member.last_seen_s
        if silent_s > timeout_s:
            orders += lose(ledger, name, f"silent for {silent_s:.0f} s")
    return orders


def why_stuck(ledger: Ledger, report: InstanceReported, *, timeout_s: float) -> str | None:
    """Why an instance that answers is lost all the same; None: it is not."""
    stuck_s = ledger.members.serving[report.instance].looked_at_step(report.boundary, ledger.now_s)
    # by both clocks: what was stopped together with the scheduler is not to blame for it
    if min(stuck_s, report.busy_s) <= timeout_s:
        return None
    return f"its decode step {report.boundary} has been running for {report.busy_s:.0f} s"


def lose(ledger: Ledger, instance: str, reason: str) -> list[Order]:
    """Give up an instance: what it owned is queued again, moves with it end."""
    member = ledger.members.serving.get(instance)
    if member is None:
        return []
    ledger.members.change(instance, InstanceState.GONE)
    orders: list[Order] = []
    for order in ledger.moves.touching(instance):
        if order.source == instance:
            orders += ledger.end_move(order.key, MoveOutcome.LOST, f"{instance}: {reason}")
            epoch = ledger.samples[order.key].request.epoch + TAKEN_BACK_EPOCHS
            orders += ledger.if_alive(
                order.destination, verdict_for(order.destination, order.move_id, order.key, epoch, False)
            )
        else:
            # the source keeps the sample, or asks for it back: it may have finished meanwhile
            call_off = CallOff(move_id=order.move_id, reason=f"{instance} is lost: {reason}")
            orders += ledger.if_alive(order.source, SendVerdict(instance=order.source, verdict=call_off))
    lost, member.owned = member.owned, {}
    for key in lost:
        ledger.queue_again(key)
    return [*orders, Abandon(instance=instance, reason=reason, num_requeued=len(lost))]
