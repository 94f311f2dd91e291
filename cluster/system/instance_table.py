"""The loop's table of instances: which were made, where each stands, how to reach it, what it has done.

The generation pool makes rows and ends them; the scheduler client marks what has joined and what is lost; publication
and the recorder read. A scheduler fills a table of its own (`policies.scheduling.members`) from this one, when
instances join and when it takes over from a dead one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...actors.remote.remote import Handle
from ...core.decode_records import GenerationStats
from ...policies.scheduling.members import KEPT_GONE, InstanceState
from ..plan.topology import PlacementSlot


@dataclass(slots=True, kw_only=True)
class Instance:
    """One row."""

    handle: Handle
    num_slots: int
    place: PlacementSlot | None = None
    "where it runs; None once a replacement runs there"
    sentinel: Any = None
    "reference to the end of its decode loop"
    state: InstanceState = InstanceState.JOINING
    group: Any = None
    "its own placement group; None: it stands in the run's"
    leaves_because: str = ""
    node: str = ""
    "Ray's id of the node that it runs on; empty: not known"
    stats: GenerationStats = field(default_factory=GenerationStats)
    "as the scheduler told last"


class InstanceTable(dict[str, Instance]):
    """The instances of the run by name; of those that are gone, the last KEPT_GONE."""

    def __init__(self, rows: Mapping[str, Instance] | None = None) -> None:
        """`rows`: to begin with."""
        super().__init__()
        self._gone: list[str] = []
        self._dropped = GenerationStats()
        for name, row in (rows or {}).items():
            self[name] = row

    def __setitem__(self, name: str, row: Instance) -> None:
        super().__setitem__(name, row)
        self._gone += [
            name for name, row in self.items() if row.state is InstanceState.GONE and name not in self._gone
        ]
        while len(self._gone) > KEPT_GONE:
            self._dropped += self.pop(self._gone.pop(0)).stats

    @property
    def stats(self) -> GenerationStats:
        """What all have done, those that are not kept any more included, as the scheduler told last."""
        return sum((row.stats for row in self.values()), self._dropped)

    @property
    def serving(self) -> dict[str, Instance]:
        """Those that have joined and are neither lost nor gone."""
        joined = (InstanceState.SERVING, InstanceState.LEAVING)
        return {name: row for name, row in self.items() if row.state in joined}

    @property
    def handles(self) -> dict[str, Handle]:
        """How to reach those that are not lost."""
        return {name: row.handle for name, row in self.items() if row.state is not InstanceState.GONE}
