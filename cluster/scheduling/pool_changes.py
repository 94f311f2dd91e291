"""How the generation pool changes during a run: growth, shrinking, nodes that announce their end, lost extra instances.

The scheduler decides and empties; here actors are started and ended, and nothing is waited for. A start that fails is
said and tried again later; the run goes on with what it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import ray
from ray.util.placement_group import PlacementGroup

from actors.actor_messages import LostInstance, Taken
from cluster.placement.single_places import SinglePlaces, announced_ends, node_of
from cluster.placement.topology import Place, Topology
from cluster.scheduling.departures import Departures
from cluster.scheduling.instance_table import Instance, InstanceTable
from cluster.scheduling.joiners import Joiner, Joiners, Ready
from cluster.scheduling.scheduler_client import SchedulerClient
from cluster.weights.publish import PublishedWeights
from core.config import ClusterConfig
from policies.scaling.scaling_records import Resize, Starts
from policies.scheduling.members import InstanceState

NODES_EVERY_S = 1.0
"Between two looks for nodes that announce their end."
BLOCKED_S = 30.0
"After a failed start, doubled with every further one up to"
MOST_BLOCKED_S = 600.0


class PoolChanges:
    """Of one pool; looked at by the loop's thread."""

    def __init__(
        self,
        cluster: ClusterConfig,
        topology: Topology,
        run_group: PlacementGroup,
        places: SinglePlaces,
        scheduler: SchedulerClient,
        instances: InstanceTable,
        *,
        order: Callable[[Place, PlacementGroup | None], Joiner],
        note: Callable[[str], None],
    ) -> None:
        """`run_group` holds the first places; `order` starts an actor; `note` takes one line for a person."""
        self._settings, self._topology, self._places = cluster.generation, topology, places
        self._scheduler, self._instances, self._order, self._note = scheduler, instances, order, note
        self._joiners = Joiners(places, note, start_timeout_s=cluster.start_timeout_s)
        self.departures = Departures()
        self.rollouts_ahead = 0
        self._next_number = len(topology.generation)
        self._run_group = run_group
        self._vacant: list[Place] = []
        "first places whose instance has left with its node: Ray reserves them again elsewhere"
        self._start_up_s = 0.0
        self._num_failed, self._blocked_until_s = 0, 0.0
        self._nodes_at_s = 0.0
        self._ending: set[str] = set()
        self._counts = dict.fromkeys(("num_joined", "num_left", "num_failed_starts"), 0)

    @property
    def _staying(self) -> dict[str, Instance]:
        return {name: row for name, row in self._instances.items() if row.state is InstanceState.SERVING}

    def begin(self, *, start_up_s: float) -> None:
        """The first instances serve: start what the pool is to begin with beyond them."""
        self._start_up_s = start_up_s
        self._start(self._settings.num_actors - self._settings.least)
        self._tell()

    def look(self, taken: Taken, weights: Mapping[str, PublishedWeights], *, may_fetch: bool) -> list[Ready]:
        """Carry out what is due; the instances that may join now."""
        for left in taken.left:
            self._end(left.instance)
        if taken.resized is not None:
            self._resize(taken.resized)
        self.departures.look()
        self._empty_ending_nodes()
        ready, failed = self._joiners.look(weights, may_fetch=may_fetch, num_there=len(self._staying))
        for joiner, reason in failed:
            self._fail(f"{joiner.name} could not start: {reason}")
        missing = self._settings.least - len(self._staying) - len(self._joiners) - len(ready)
        if missing > 0 and not self._is_blocked:
            self._start(missing)
        if not ready:
            self._tell()
        return ready

    def join(self, ready: Ready) -> None:
        """Let an instance that holds the current weights take samples."""
        one = ready.joiner
        self._instances[one.name] = Instance(
            handle=one.handle,
            num_slots=one.spec.engine.max_running_samples,
            place=one.place,
            group=one.group,
            node=ready.node,
            sentinel=one.sentinel,
        )
        self._scheduler.join(one.name)
        self._start_up_s, self._num_failed = one.started_s, 0
        self._counts["num_joined"] += 1
        self._note(f"{one.name} joined after {one.started_s:.1f} s: {len(self._staying)} instances")
        self._tell()

    def lost(self, lost: LostInstance) -> None:
        """An instance with a bundle of its own, or that was leaving, is gone: give its place back.

        Another starts where the pool's size asks for it.
        """
        row = self._instances[lost.instance]
        row.state = InstanceState.GONE
        ray.kill(row.handle)
        self._give_back(row)()
        again = f"; {lost.num_requeued} samples were queued again" if lost.num_requeued else ""
        if row.leaves_because:
            self._note(f"instance {lost.instance} was lost while it was emptied ({lost.reason}){again}")
        else:
            self._fail(f"instance {lost.instance} was lost ({lost.reason}){again}")

    def figures(self) -> dict[str, float]:
        """What has changed since the last call."""
        if not self._settings.is_elastic and not any(self._counts.values()):
            return {}
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        found = {f"pool/{name}": float(count) for name, count in counts.items()}
        return found | {"pool/instances": float(len(self._staying)), "pool/start_up_s": self._start_up_s}

    def stop(self) -> None:
        """Give up what is on its way; bundles are given back by whoever owns `places`."""
        self._joiners.cancel_all()

    @property
    def _is_blocked(self) -> bool:
        return time.monotonic() < self._blocked_until_s

    def _tell(self) -> None:
        """Let the scheduler know what it decides by."""
        if not self._settings.is_elastic:
            return
        starts = Starts(
            num_starting=len(self._joiners),
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
        there = len(self._staying) + len(self._joiners)
        if change.target > there:
            if not self._is_blocked:
                self._note(f"the generation pool grows from {there} to {change.target}: {change.reason}")
                self._start(change.target - there)
            return
        cancelled = self._joiners.cancel(there - change.target)
        if change.leave or cancelled:
            self._note(f"the generation pool shrinks to {change.target}: {change.reason}")

    def _start(self, count: int) -> None:
        for _ in range(count):
            place, group = self._free_place()
            self._joiners.add(self._order(place, group))

    def _free_place(self) -> tuple[Place, PlacementGroup | None]:
        """A bundle, under a name that no instance has had: one of the first that is vacant, or a new one."""
        place = self._topology.added(self._next_number)
        self._next_number += 1
        for vacant in self._vacant:
            node = node_of(self._run_group, vacant.bundle)
            if node and node not in self._ending:
                self._vacant.remove(vacant)
                return replace(vacant, name=place.name), None
        return place, self._places.reserve(place)

    def _end(self, name: str) -> None:
        """An instance is empty: hear its last words, end it, give its place back."""
        row = self._instances[name]
        row.state = InstanceState.GONE
        self._counts["num_left"] += 1
        give_back = self._give_back(row)

        def then() -> None:
            give_back()
            self._note(f"{name} has left: {len(self._staying)} instances")

        self.departures.begin(name, row.handle, then)

    def _give_back(self, row: Instance) -> Callable[[], None]:
        """Take an instance's place from its row; what gives it back once the actor is gone."""
        (place, row.place), (group, row.group) = (row.place, None), (row.group, None)
        if group is not None:
            return lambda: self._places.free(group)
        return lambda: self._vacant.append(place) if place is not None else None

    def _fail(self, what: str) -> None:
        """Say that a start failed, and start nothing for a while."""
        self._num_failed += 1
        self._counts["num_failed_starts"] += 1
        wait_s = min(BLOCKED_S * 2.0 ** (self._num_failed - 1), MOST_BLOCKED_S)
        self._blocked_until_s = time.monotonic() + wait_s
        self._note(
            f"{what}; the run goes on with {len(self._staying)} instances, and none is started for {wait_s:.0f} s"
        )

    def _empty_ending_nodes(self) -> None:
        """Let the scheduler empty instances whose node has announced its end, and start others elsewhere."""
        now_s = time.monotonic()
        if now_s - self._nodes_at_s < NODES_EVERY_S:
            return
        self._nodes_at_s = now_s
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
