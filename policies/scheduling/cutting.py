"""All open samples end where they are, to go on with new weights: what waits at once, what decodes at its next step.

An instance is told again with each of its reports until it holds nothing: a sample that was on its way comes up at its
destination, or back at its source. What is queued again meanwhile is handed back with what it was asked for with.
"""

from __future__ import annotations

import heapq

from rlhfspec.core.records import as_asked
from rlhfspec.policies.migration.move_messages import MoveOutcome
from rlhfspec.policies.scheduling.accepted import Accepted
from rlhfspec.policies.scheduling.events import CutAll, CutOwned, Deliver, Event, InstanceReported, Order
from rlhfspec.policies.scheduling.ledger import Ledger


def cut(ledger: Ledger, accepted: Accepted, event: Event) -> list[Order]:
    """Deliver what has no owner; tell who holds samples: everybody at first, then whoever reports."""
    orders: list[Order] = []
    while ledger.waiting:
        _, key = heapq.heappop(ledger.waiting)
        completion = as_asked(ledger.samples.pop(key).request)
        # whatever comes of it later was cut elsewhere
        accepted.add(key, completion.epoch, digest="")
        orders += ledger.end_move(key, MoveOutcome.LOST, "it was cut while nobody held it")
        orders.append(Deliver(completion=completion))
    serving = ledger.members.serving
    notified = {event.instance} & serving.keys() if isinstance(event, InstanceReported) else set()
    if isinstance(event, CutAll):
        notified = set(serving)
    held = {name: frozenset(serving[name].owned) for name in sorted(notified) if serving[name].owned}
    return orders + [CutOwned(instance=name, keys=keys) for name, keys in held.items()]
