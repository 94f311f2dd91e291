"""Places that come and go during a run: one bundle each, reserved in the background and given back one by one."""

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

from rlhfspec.cluster.plan.topology import POOL_LABEL, Place, amounts, gaps


class SinglePlaces:
    """The single bundles of one run; whoever makes it frees them all at the end."""

    def __init__(self, *, pinned_to: str | None = None) -> None:
        """`pinned_to`: the pool whose nodes they must be on (`cluster.pin_pools`)."""
        self._selector = {POOL_LABEL: pinned_to} if pinned_to else None
        self._groups: list[PlacementGroup] = []

    def reserve(self, place: Place) -> PlacementGroup:
        """Ask for a bundle and return at once; an autoscaler sees the wish."""
        group = placement_group(
            [place.resources()],
            strategy="PACK",
            bundle_label_selector=[self._selector] if self._selector else None,  # type: ignore[arg-type]
        )
        self._groups.append(group)
        return group

    def free(self, group: PlacementGroup) -> None:
        """Give a bundle back; what runs there ends."""
        if group in self._groups:
            self._groups.remove(group)
            remove_placement_group(group)

    def free_all(self) -> None:
        """Give back what is left."""
        for group in list(self._groups):
            self.free(group)

    def explain(self, place: Place, *, waited_s: float) -> str:
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
