"""Open samples end where they are: what waits at once, what decodes at its next step.

An instance is told again with each of its reports until it holds nothing: a sample that was on its way comes up at its
destination, or back at its source. What is queued again meanwhile is handed back with what it was asked for with.
"""

from __future__ import annotations

from collections.abc import Set

from ...core.records import SampleKey, as_asked
from ..migration.move_messages import MoveOutcome
from .accepted import Accepted
from .events import Cut, CutOwned, Deliver, Event, InstanceReported, Order
from .ledger import Ledger


def cut(ledger: Ledger, accepted: Accepted, event: Event, keys: Set[SampleKey] | None) -> list[Order]:
    """Deliver what has no owner; tell who holds samples: everybody at first, then whoever reports.

    `keys`: of the samples that are to end; None: all.
    """
    orders: list[Order] = []
    waiting = sorted(ledger.waiting)
    ledger.waiting[:] = [] if keys is None else [entry for entry in waiting if entry[1] not in keys]
    for _, key in waiting:
        if keys is not None and key not in keys:
            continue
        completion = as_asked(ledger.samples.pop(key).request)
        # whatever comes of it later was cut elsewhere
        accepted.add(key, completion.epoch, digest="")
        orders += ledger.end_move(key, MoveOutcome.LOST, "it was cut while nobody held it")
        orders.append(Deliver(completion=completion))
    serving = ledger.members.serving
    notified = {event.instance} & serving.keys() if isinstance(event, InstanceReported) else set()
    if isinstance(event, Cut):
        notified = set(serving)
    held = {name: frozenset(serving[name].owned) for name in sorted(notified)}
    if keys is not None:
        held = {name: owned & keys for name, owned in held.items()}
    return orders + [CutOwned(instance=name, keys=owned) for name, owned in held.items() if owned]
