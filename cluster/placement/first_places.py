"""The generation pool's places in the run's own placement group: who leaves one makes it vacant for the next.

Ray reserves a bundle again elsewhere when its node has gone, so a vacant first place is taken before another single
place is asked for: both would be waiting for the same room.
"""

from __future__ import annotations

from collections.abc import Collection

from ray.util.placement_group import PlacementGroup

from rlhfspec.cluster.placement.single_places import living_nodes, nodes_of
from rlhfspec.cluster.plan.topology import Place


class FirstPlaces:
    """Of one run."""

    def __init__(self, group: PlacementGroup) -> None:
        """`group` holds all first places; all of them are taken."""
        self._group = group
        self._vacant: list[Place] = []

    def give_back(self, place: Place) -> None:
        """Nobody stands there any more."""
        self._vacant.append(place)

    def take(self, *, ending: Collection[str]) -> Place | None:
        """One that is vacant, reserved or about to be, and not on a node that ends (`ending`: their ids); None: none.

        An actor that is ordered there starts when Ray has reserved the bundle again.
        """
        if not self._vacant:
            return None
        nodes, kept = nodes_of(self._group), living_nodes().intersection(ending)
        for place in self._vacant:
            if nodes.get(place.bundle) not in kept:
                self._vacant.remove(place)
                return place
        return None

    def take_reserved(self, *, ending: Collection[str]) -> Place | None:
        """One that is vacant and on a node that lives and does not end; None: none."""
        nodes, good = nodes_of(self._group), living_nodes().difference(ending)
        for place in self._vacant:
            if nodes.get(place.bundle) in good:
                self._vacant.remove(place)
                return place
        return None

    def take_back(self, place: Place) -> None:
        """Take this one, which is vacant, wherever its bundle is now."""
        self._vacant.remove(place)

    def reserved(self) -> set[int]:
        """The bundles that are on nodes that live, vacant or not."""
        living = living_nodes()
        return {bundle for bundle, node in nodes_of(self._group).items() if node in living}
