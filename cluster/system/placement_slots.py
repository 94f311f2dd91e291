"""Where the instances of one run may stand: the first ones' bundles, and single ones that come and go.

The first bundles are of the run's own placement group, of which Ray gives none back: who leaves one makes it vacant for
the next. Ray reserves such a bundle again elsewhere when its node has gone, so a vacant one is taken before a single
bundle is asked for: both would be waiting for the same room. Single bundles are reserved in the background and given
back one by one.
"""

from __future__ import annotations

import time
from collections.abc import Collection

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from ..plan.topology import POOL_LABEL, PlacementSlot, Topology, amounts, gaps
from ..ray_start.machine import num_cores


class PlacementSlots:
    """Those of one run; whoever makes it frees what is left at the end. A place's group is None in a first place."""

    def __init__(self, run_group: PlacementGroup, *, pinned_to: str | None = None) -> None:
        """`run_group` holds all first places, which are taken; `pinned_to`: the pool of nodes that single ones want."""
        self._run_group = run_group
        self._selector = {POOL_LABEL: pinned_to} if pinned_to else None
        self._vacant: list[PlacementSlot] = []
        self._single: list[PlacementGroup] = []

    def take(
        self, wanted: PlacementSlot, *, ending: Collection[str]
    ) -> tuple[PlacementSlot, PlacementGroup | None]:
        """A first place that is vacant and not on a node that ends (`ending`: their ids), else a single one.

        An actor that is ordered there starts when Ray has reserved the bundle; an autoscaler sees the wish.
        """
        vacant = self.take_vacant(ending=ending)
        return (wanted, self.reserve(wanted)) if vacant is None else (vacant, None)

    def take_vacant(self, *, ending: Collection[str], is_reserved: bool = False) -> PlacementSlot | None:
        """A vacant first place that is not on a node that ends; None: none. `is_reserved`: on a node that lives now."""
        if not self._vacant:
            return None
        nodes, living = nodes_of(self._run_group), living_nodes()
        for place in self._vacant:
            node = nodes.get(place.bundle)
            if node in living.difference(ending) if is_reserved else node not in living.intersection(ending):
                self._vacant.remove(place)
                return place
        return None

    def take_back(self, place: PlacementSlot) -> None:
        """Take this first place, which is vacant, wherever its bundle is now."""
        self._vacant.remove(place)

    def reserve(self, place: PlacementSlot) -> PlacementGroup:
        """Ask for a single bundle and return at once."""
        group = placement_group(
            [place.resources()],
            strategy="PACK",
            bundle_label_selector=[self._selector] if self._selector else None,  # type: ignore[arg-type]
        )
        self._single.append(group)
        return group

    def give_back(self, place: PlacementSlot, group: PlacementGroup | None) -> None:
        """Nobody stands there any more; what runs in a single bundle ends."""
        if group is None:
            self._vacant.append(place)
        elif group in self._single:
            self._single.remove(group)
            remove_placement_group(group)

    def free_all(self) -> None:
        """Give the single bundles back that are left."""
        for group in list(self._single):
            self._single.remove(group)
            remove_placement_group(group)

    def reserved(self) -> set[int]:
        """The first bundles that are on nodes that live, vacant or not."""
        living = living_nodes()
        return {bundle for bundle, node in nodes_of(self._run_group).items() if node in living}

    def explain(self, place: PlacementSlot, *, waited_s: float) -> str:
        """Why a bundle may not have come so far: what is asked for, what the cluster has, what is missing."""
        wanted, total, free = place.resources(), ray.cluster_resources(), ray.available_resources()
        missing = gaps(wanted, free)
        gap = f"missing: {amounts(missing)}" if missing else "enough in all, but not on one node"
        if self._selector and not any(
            node["Alive"] and self._selector.items() <= node["Labels"].items() for node in ray.nodes()
        ):
            gap = f"no node has the label {POOL_LABEL}={self._selector[POOL_LABEL]} (cluster.pin_pools)"
        have = amounts({name: total.get(name, 0.0) for name in wanted})
        idle = amounts({name: free.get(name, 0.0) for name in wanted})
        return (
            f"{place.name} has had no place for {waited_s:.0f} s: it wants {amounts(wanted)}, the cluster has {have}, "
            f"of which {idle} free; {gap}"
        )


def is_placed(group: PlacementGroup) -> bool:
    """Whether its bundles are reserved."""
    return placement_group_table(group).get("state") == "CREATED"


def nodes_of(group: PlacementGroup) -> dict[int, str]:
    """Ray's ids of the nodes that its bundles are on, or were before their nodes went, by bundle."""
    return dict(placement_group_table(group).get("bundles_to_node_id", {}))


def cores_of(group: PlacementGroup, topology: Topology) -> dict[int, tuple[str, float]]:
    """Node and its cores of every bundle that was placed; on one machine the node is called ''."""
    alive = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]}
    if len(alive) == 1:
        # what a local cluster says it has may be more than there is
        cores = min(float(num_cores()), *alive.values())
        return {place.bundle: ("", cores) for place in topology.places}
    return {bundle: (node, alive.get(node, 0.0)) for bundle, node in nodes_of(group).items()}


def living_nodes() -> set[str]:
    """Ray's ids of the nodes that it does not hold for dead."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def lost_machines(group: PlacementGroup, bundles: Collection[int]) -> list[str]:
    """Ray's ids of nodes that are gone, and on which some of these bundles still have their place."""
    return sorted({node for bundle, node in nodes_of(group).items() if bundle in bundles} - living_nodes())


def announced_ends(nodes: Collection[str]) -> dict[str, float | None]:
    """Seconds until each of these nodes ends that has announced it (`ray drain-node`, spot notice); None: no deadline.

    Empty where Ray does not answer: it is asked again soon.
    """
    # Ray Serve asks the same way; there is no public one
    from ray._private.state import state

    try:
        draining = state.get_draining_nodes()
    except (RayError, RuntimeError):
        return {}
    now_ms = time.time() * 1000.0
    return {
        node: (deadline_ms - now_ms) / 1000.0 if deadline_ms else None
        for node, deadline_ms in draining.items()
        if node in nodes
    }
