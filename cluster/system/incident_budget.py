"""How often lost instances are replaced: a bound on crashes that come again and again, not on the size of a node."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlhfspec.actors.waiting.restart_budget import RestartBudget
from rlhfspec.core.errors import InstanceLost

INCIDENT_S = 60.0
"Instances of one node that are lost within so long of the first are one incident, each place counted once."


class IncidentBudget:
    """Of one run."""

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`most`: incidents that are made good within an hour; `clock` is monotonic, in seconds."""
        self._budget, self._clock = RestartBudget(most, clock=clock), clock
        self._incidents: dict[str, tuple[float, set[str]]] = {}
        "by node: since when, and which places"

    def spend(self, *, place: str, node: str, what: str) -> None:
        """Count the loss of the instance in `place` on `node` (empty: not known) that `what` tells of.

        Raises InstanceLost when all are used up.
        """
        now_s = self._clock()
        began_s, places = self._incidents.get(node, (now_s, set()))
        if node and places and place not in places and now_s - began_s <= INCIDENT_S:
            places.add(place)
            return
        self._incidents[node] = (now_s, {place})
        if not self._budget.spend():
            raise InstanceLost(
                f"{what} and all {self._budget.most} replacements within an hour are used up; look at the actors' logs "
                "in the Ray dashboard, or raise cluster.max_instance_restarts"
            )
