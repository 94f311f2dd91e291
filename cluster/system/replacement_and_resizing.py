"""How the generation pool changes during a run: growth, shrinking, lost instances, nodes that announce their end.

The scheduler decides and empties; here actors are started and ended, and nothing is waited for. A start that fails is
said and tried again later; the run goes on with what it has, and without any for a while only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import ray
from ray.util.placement_group import PlacementGroup

from ...actors.actor_messages import LostInstance, Taken
from ...actors.remote import run_metrics
from ...actors.remote.restart_budget import RestartBudget
from ...actors.remote.waiting import awake_s
from ...core.config import ClusterConfig
from ...core.errors import InstanceLost, WaitTimeout
from ...policies.scaling.scaling_records import Resize, Starts
from ...policies.scheduling.members import InstanceState
from ..plan.topology import PlacementSlot, Topology
from ..weights.publish import PublishedWeights
from .instance_table import Instance, InstanceTable
from .placement_slots import PlacementSlots, announced_ends
from .scheduler_client import SchedulerClient
from .starting_and_leaving import LeavingInstances, Ready, StartingInstance, StartingInstances

INCIDENT_S = 60.0
"Instances of one node that are lost within so long of the first are one incident, each place counted once."
NODES_EVERY_S = 1.0
"Between two looks for nodes that announce their end, and for places that have come back."
BLOCKED_S = 30.0
"After a failed start, doubled with every further one up to"
MOST_BLOCKED_S = 600.0


class IncidentBudget:
    """How often lost instances are replaced: a bound on crashes that come again and again, not on a node's size."""

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


class PoolChanges:
    """Of one pool; looked at by the loop's thread."""

    def __init__(
        self,
        cluster: ClusterConfig,
        topology: Topology,
        places: PlacementSlots,
        scheduler: SchedulerClient,
        instances: InstanceTable,
        *,
        order: Callable[[str, PlacementSlot, PlacementGroup | None], StartingInstance],
        note: Callable[[str], None],
    ) -> None:
        """`order` starts an actor by its name; `note` takes a line for a person."""
        self._settings, self._topology, self._places = cluster.generation, topology, places
        self._scheduler, self._instances, self._note = scheduler, instances, note
        self._starting = StartingInstances(places, note, order, start_timeout_s=cluster.start_timeout_s)
        self._budget = IncidentBudget(cluster.max_instance_restarts)
        self.leaving = LeavingInstances()
        self.rollouts_ahead = 0
        self._next_number = len(topology.generation)
        self._start_up_s = 0.0
        self._num_failed, self._failed_s = 0, 0.0
        self._nodes_at_s = 0.0
        self._ending: set[str] = set()
        self._num_replacements = 0
        self._num_owed = 0
        "lost instances whose place nobody has taken so far"
        self._relieved: dict[str, str] = {}
        "by one that starts in a first place: the instance whose bundle of its own is to be given back then"
        self._none_since_s: float | None = None
        self._none_timeout_s = cluster.no_instance_timeout_s
        self._last_failure = ""
        self._counts = dict.fromkeys(("num_joined", "num_left", "num_failed_starts"), 0)

    @property
    def _staying(self) -> dict[str, Instance]:
        return {name: row for name, row in self._instances.items() if row.state is InstanceState.SERVING}

    @property
    def _num_coming(self) -> int:
        """Instances on their way that add to those that stay."""
        return len(self._starting) - sum(name in self._staying for name in self._relieved.values())

    def order_first(self) -> None:
        """Start the processes of the first instances; they come up while the caller goes on."""
        for place in self._topology.generation:
            self._starting.start(place.name, place)

    def bring_up_first(self, weights: Mapping[str, PublishedWeights]) -> list[Ready]:
        """Wait for the first instances. Raises what one of them cannot start by."""
        first = self._starting.bring_up(weights)
        for ready in first:
            self._admit(ready)
        return first

    def begin(self, *, start_up_s: float) -> None:
        """The first instances serve: start what the pool is to begin with beyond them."""
        self._start_up_s = start_up_s
        self._start(self._settings.num_actors - self._settings.least)
        self._expect_starts()

    def look(self, taken: Taken, weights: Mapping[str, PublishedWeights], *, may_fetch: bool) -> list[Ready]:
        """Carry out what is due; the instances that may join now.

        Raises WaitTimeout when there has been no instance for `cluster.no_instance_timeout_s`, nor one that starts.
        """
        for left in taken.left:
            self._end(left.instance)
        if taken.resized is not None:
            self._resize(taken.resized)
        self.leaving.look()
        if (now_s := time.monotonic()) - self._nodes_at_s >= NODES_EVERY_S:
            self._nodes_at_s = now_s
            self._empty_ending_nodes()
            self._move_into_first_places()
            self._relieve_one()
        ready, failed = self._starting.look(weights, may_fetch=may_fetch, num_there=len(self._staying))
        for one, error in failed:
            relieved = self._relieved.pop(one.name, None)
            if one.group is None and one.place.bundle not in self._places.reserved():
                if relieved is not None and relieved in self._staying:
                    self._note(
                        f"{one.name} lost its place before it had joined; {relieved} stays where it is"
                    )
                    continue
                self._start_in(one.place, f"{one.name} lost its place before it had joined ({error})")
            else:
                self._fail(f"{one.name} could not start: {error}")
        missing = self._settings.least - len(self._staying) - self._num_coming - len(ready)
        if missing > 0 and not self._is_blocked:
            self._start(missing)
        if ready or self._instances.serving:
            self._none_since_s = None
        else:
            self._wait_for_one()
        if not ready:
            self._expect_starts()
        return ready

    def join(self, ready: Ready) -> None:
        """Let an instance that holds the current weights take samples."""
        one = ready.instance
        self._admit(ready)
        self._start_up_s, self._num_failed = one.started_s, 0
        self._counts["num_joined"] += 1
        if self._num_owed:
            self._num_owed -= 1
            run_metrics.add("replaced_actors", pool="generation")
        self._note(f"{one.name} joined after {one.started_s:.1f} s: {len(self._staying)} instances")
        relieved = self._relieved.pop(one.name, None)
        if relieved is not None and relieved in self._staying:
            self._scheduler.leave(relieved, f"{one.name} stands in a place of the run's own in its stead")
        self._expect_starts()

    def lose(self, lost: LostInstance) -> str | None:
        """An instance is gone: give its place back; the name of the one that takes its place at once, if one does.

        Where it had a bundle of its own, another starts when the pool's size asks for it; where it was leaving,
        another was started then. Raises InstanceLost when `cluster.max_instance_restarts` are used up.
        """
        row = self._instances[lost.instance]
        if row.place is None:
            # told before
            return None
        reason, place, has_own, row.state = lost.reason, row.place, row.group is not None, InstanceState.GONE
        ray.kill(row.handle)
        run_metrics.add("lost_actors", pool="generation")
        self._give_back(row)()
        again = f"; {lost.num_requeued} samples were queued again" if lost.num_requeued else ""
        if row.leaves_because:
            self._note(f"instance {lost.instance} was lost while it was emptied ({reason}){again}")
            return None
        self._num_owed += 1
        if has_own:
            self._fail(f"instance {lost.instance} was lost ({reason}){again}")
            return None
        what = f"instance {lost.instance} was lost ({reason})"
        self._budget.spend(place=place.name, node=row.node, what=what)
        self._num_replacements += 1
        name = f"{place.name}-r{self._num_replacements}"
        self._note(f"{what}{again}; {name} takes its place")
        self._places.take_back(place)
        self._starting.start(name, place)
        return name

    def metrics(self) -> dict[str, float]:
        """What has changed since the last call."""
        if not self._settings.is_elastic and not any(self._counts.values()):
            return {}
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        found = {f"pool/{name}": float(count) for name, count in counts.items()}
        return found | {"pool/instances": float(len(self._staying)), "pool/start_up_s": self._start_up_s}

    def stop(self) -> None:
        """Give up what is on its way; bundles are given back by whoever owns `places`."""
        self._starting.cancel_all()

    @property
    def _is_blocked(self) -> bool:
        return self._blocked_s > 0.0

    @property
    def _blocked_s(self) -> float:
        """For how long none is started; with nobody left there is less to lose."""
        if not self._num_failed:
            return 0.0
        most_s = MOST_BLOCKED_S if self._instances.serving else BLOCKED_S
        wait_s = min(BLOCKED_S * 2.0 ** (self._num_failed - 1), most_s)
        return max(0.0, self._failed_s + wait_s - time.monotonic())

    def _expect_starts(self) -> None:
        """Let the scheduler know what it decides by."""
        if not self._settings.is_elastic:
            return
        starts = Starts(
            num_starting=self._num_coming,
            start_up_s=round(self._start_up_s, 1),
            rollouts_ahead=self.rollouts_ahead,
            is_blocked=self._is_blocked,
        )
        self._scheduler.expect(
            starts, tuple(name for name, row in self._staying.items() if row.group is not None)
        )

    def _resize(self, change: Resize) -> None:
        for name in change.leave:
            row = self._instances[name]
            if row.state is InstanceState.SERVING:
                row.state, row.leaves_because = InstanceState.LEAVING, change.reason
                self._give_up_relief(name)
        there = len(self._staying) + self._num_coming
        if change.target > there:
            if not self._is_blocked:
                self._note(f"the generation pool grows from {there} to {change.target}: {change.reason}")
                self._start(change.target - there)
            return
        cancelled = self._starting.cancel(there - change.target)
        if change.leave or cancelled:
            self._note(f"the generation pool shrinks to {change.target}: {change.reason}")

    def _start(self, count: int) -> None:
        # one that was to relieve another adds to it instead
        while count and self._relieved:
            self._relieved.popitem()
            count -= 1
        for _ in range(count):
            added = self._next_place()
            self._starting.start(added.name, *self._places.take(added, ending=self._ending))

    def _next_place(self) -> PlacementSlot:
        """A place of its own, under a name that no instance has had."""
        self._next_number += 1
        return self._topology.added(self._next_number - 1)

    def _start_in(self, place: PlacementSlot, why: str) -> None:
        """Start one in a vacant first place that is on no node: it waits there, so it cannot fail at once again."""
        name = self._next_place().name
        self._note(f"{why}; {name} starts there when there is room")
        self._places.take_back(place)
        self._starting.start(name, place)

    def _move_into_first_places(self) -> None:
        """Have those that wait for a bundle of their own start in a first place that has become vacant.

        Ray reserves that again: it would take the room that they wait for.
        """
        while (waiting := self._starting.without_place()) is not None:
            vacant = self._places.take_vacant(ending=self._ending)
            if vacant is None:
                return
            self._starting.drop(waiting)
            # Ray frees the other's name some time after its end
            name = self._next_place().name
            self._starting.start(name, vacant)
            self._note(
                f"a place of the run's own is vacant: {name} starts there in the stead of {waiting.name}"
            )

    def _relieve_one(self) -> None:
        """Have one start in a vacant first place that is reserved, in the stead of one with a bundle of its own.

        Ray gives back no single bundle of the run's group: the vacant one would be held to the end, for nobody.
        """
        own = next((name for name, row in self._staying.items() if row.group is not None), None)
        if own is None or len(self._starting) or self._is_blocked or not self.rollouts_ahead:
            return
        vacant = self._places.take_vacant(ending=self._ending, is_reserved=True)
        if vacant is None:
            return
        name = self._next_place().name
        self._relieved[name] = own
        self._starting.start(name, vacant)
        self._note(
            f"a place of the run's own is vacant: {name} starts there in the stead of {own}, which leaves then"
        )

    def _give_up_relief(self, name: str) -> None:
        """One that was to be relieved leaves by itself: nobody takes its place."""
        for relief in [relief for relief, relieved in self._relieved.items() if relieved == name]:
            del self._relieved[relief]
            self._starting.give_up(relief)

    def _end(self, name: str) -> None:
        """An instance is empty: hear its final report, end it, give its place back."""
        row = self._instances[name]
        row.state = InstanceState.GONE
        self._counts["num_left"] += 1
        give_back = self._give_back(row)

        def then() -> None:
            give_back()
            self._note(f"{name} has left: {len(self._staying)} instances")

        self.leaving.begin(name, row.handle, then)

    def _give_back(self, row: Instance) -> Callable[[], None]:
        """Take an instance's place from its row; what gives it back once the actor is gone."""
        (place, row.place), (group, row.group) = (row.place, None), (row.group, None)
        return lambda: self._places.give_back(place, group) if place is not None else None

    def _fail(self, what: str) -> None:
        """Say that a start failed, and start nothing for a while."""
        if not self._is_blocked:
            # what fails together, as on a node that dies, counts once
            self._num_failed, self._failed_s = self._num_failed + 1, time.monotonic()
        self._counts["num_failed_starts"] += 1
        self._last_failure = what
        self._note(
            f"{what}; the run goes on with {len(self._staying)} instances, and none is started for "
            f"{self._blocked_s:.0f} s"
        )

    def _admit(self, ready: Ready) -> None:
        one = ready.instance
        self._instances[one.name] = Instance(
            handle=one.handle,
            num_slots=one.spec.engine.max_running_samples,
            place=one.place,
            group=one.group,
            node=ready.node,
            sentinel=one.sentinel,
        )
        self._scheduler.join(one.name)

    def _wait_for_one(self) -> None:
        """No instance is left: say so, and after a while end what can be gone on with."""
        now_s = awake_s()
        names = ", ".join(self._starting.names) or "a new one"
        if self._none_since_s is None:
            self._none_since_s = now_s
            self._note(
                f"no generation instance is left; the run waits up to {self._none_timeout_s:.0f} s for {names} "
                "(cluster.no_instance_timeout_s)"
            )
        waited_s = now_s - self._none_since_s
        # one that has a place by then has a limit of its own
        if waited_s > self._none_timeout_s and not self._starting.have_a_place:
            missing = self._starting.what_is_missing() or self._last_failure
            raise WaitTimeout(
                waiter="the loop, without any generation instance,",
                waited_for=names,
                order="start and load the weights",
                waited_s=waited_s,
                advice=f"{missing or 'look at its log in the Ray dashboard'}; make room, or raise "
                "cluster.no_instance_timeout_s",
            )

    def _empty_ending_nodes(self) -> None:
        """Let the scheduler empty instances whose node has announced its end, and start others elsewhere."""
        rows = self._staying
        ends = announced_ends({row.node for row in rows.values() if row.node})
        self._ending |= ends.keys()
        for name, row in rows.items():
            if row.node not in ends:
                continue
            left_s = ends[row.node]
            within = "" if left_s is None else f" in {left_s:.0f} s"
            reason = f"its node {row.node[:12]} ends{within}"
            self._scheduler.leave(name, reason)
            self._start(1)
            self._note(f"{reason.removeprefix('its ')}: {name} is emptied, another starts elsewhere")
