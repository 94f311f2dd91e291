"""The free schedule: instances never wait for each other's samples, and versions are taken whenever they come.

Instances decode from the newest version and pause only while one is loaded. A group begun under version v may hold
tokens of v, so update v + max_staleness is the last that may learn from it. A batch is the `groups_per_batch` groups
that ended first, but for those that would leave more behind than the updates to come can take in time; these are waited
for. Under version v no more than (v + 1 + max_staleness) batches may have begun, so that a batch always has room.

Sources: the bound on what has begun is AReaL's (arXiv 2505.24298, section 5.1), over-provisioning APRIL's
(arXiv 2509.18521, section 3): more groups run than the next update takes, and the longest are carried over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...core.errors import WeightsError
from ...core.records import Completion, Rollout, SampleKey, SampleRequest, Unscored
from .rollout_schedule import InFlight, OpenSample, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeAdmission:
    """Pure arithmetic. Versions and updates count from 0; update u makes version u + 1 of version u."""

    max_staleness: int
    "weight versions between a token and the update that learns from it, at most; at least 1"
    over_provisioning: float
    "batches that run beyond the next update's; as many as `max_staleness` leave little choice"
    groups_per_batch: int
    num_iterations: int

    def most_begun(self, version: int) -> int:
        """Groups that may have begun since the run's start while a version is the newest."""
        beyond = min(self.over_provisioning, self.max_staleness)
        groups = (version + 1) * self.groups_per_batch + math.ceil(round(beyond * self.groups_per_batch, 6))
        return min(groups, self.num_iterations * self.groups_per_batch)

    def choose(self, ended: Sequence[int], running: Sequence[int], update: int) -> list[int] | None:
        """Which groups an update learns from; None while it has to wait for some.

        Args:
            ended: under which version each whole group began, in the order in which they ended.
            running: the same of those that are not whole.
            update: its number.

        Returns:
            Places in `ended`, `groups_per_batch` of them.
        """
        size, chosen, num_begun = self.groups_per_batch, set[int](), 0
        if len(ended) < size:
            return None
        counts = Counter(ended)
        counts.update(running)
        for begun in sorted(counts):
            num_begun += counts[begun]
            # the updates from the next one on that may still learn from what began so early
            later = max(begun + self.max_staleness - update, 0)
            missing = num_begun - later * size - len(chosen)
            if missing <= 0:
                continue
            mine = [place for place, one in enumerate(ended) if one <= begun and place not in chosen]
            if missing > len(mine):
                return None
            chosen.update(mine[:missing])
        rest = [place for place in range(len(ended)) if place not in chosen]
        return sorted([*chosen, *rest[: size - len(chosen)]])


@dataclass(slots=True, kw_only=True)
class _Group:
    """The samples of one prompt: they are learned from together."""

    begun: int
    num_open: int = 0
    "without a reward"
    has_tokens: bool = False


class Free(Schedule):
    """By a `FreeAdmission`. A phase begins with every version, asks for all that is open, and ends with its update."""

    ends_with_update = True

    def __init__(
        self, admission: FreeAdmission, next_requests: Callable[[int], Sequence[SampleRequest]]
    ) -> None:
        """`next_requests`: the samples of so many further prompts."""
        super().__init__(num_iterations=admission.num_iterations, max_staleness=admission.max_staleness)
        self._admission = admission
        self._next_requests = next_requests
        self._groups: dict[int, _Group] = {}
        "begun and not learned from, by group id"
        self._closed: list[int] = []
        "those of them whose samples are all scored or left out, in the order in which they ended"

    def begin(self, phase: int) -> list[SampleRequest]:
        """See `Schedule.begin`. A group that is still in line, without a token, begins under this version."""
        self._date_anew(phase)
        num_begun = phase * self._admission.groups_per_batch + len(self._groups)
        num_more = max(self._admission.most_begun(phase) - num_begun, 0)
        if num_more:
            for one in self._begin_batch(phase, self._next_requests(num_more)).values():
                self._note_open(one)
        return self._whole_turns(self._open.values())

    def whole(self, completion: Completion) -> tuple[SampleRequest, Completion] | None:
        """See `Schedule.whole`."""
        one = super().whole(completion)
        if one is not None or completion.num_tokens:
            self._groups[completion.group_id].has_tokens = True
        return one

    def ended(self, key: SampleKey, outcome: Rollout | Unscored) -> list[SampleRequest]:
        """See `Schedule.ended`."""
        group_id = self._sample(key).request.group_id
        further = super().ended(key, outcome)
        group = self._groups[group_id]
        group.num_open, group.has_tokens = group.num_open - 1, True
        if not group.num_open:
            self._closed.append(group_id)
        return further

    def has(self, batch: int) -> bool:
        """See `Schedule.has`."""
        return len(self._closed) >= self._admission.groups_per_batch and self._choose(batch) is not None

    def take(self, batch: int) -> list[Rollout]:
        """See `Schedule.take`."""
        chosen = self._choose(batch)
        if chosen is None:
            raise WeightsError(
                f"batch {batch} is to be learned from and {len(self._closed)} of its "
                f"{self._admission.groups_per_batch} groups are whole and scored; this is a fault of the project, "
                "please report it"
            )
        self._closed = [one for one in self._closed if one not in chosen]
        for group_id in chosen:
            del self._groups[group_id]
        taken: list[Rollout] = []
        for begun, rollouts in list(self._ready.items()):
            mine = {key: one for key, one in rollouts.items() if one.completion.group_id in chosen}
            taken += mine.values()
            self._ready[begun] = {key: one for key, one in rollouts.items() if key not in mine}
            if not self._ready[begun] and all(group.begun != begun for group in self._groups.values()):
                del self._ready[begun]
        return self._fresh(batch, taken)

    def in_flight(self) -> InFlight:
        """See `Schedule.in_flight`."""
        ended = tuple((group_id, self._groups[group_id].begun) for group_id in self._closed)
        return replace(super().in_flight(), ended=ended)

    def restore(self, in_flight: InFlight) -> None:
        """See `Schedule.restore`."""
        super().restore(in_flight)
        self._groups = {group_id: _Group(begun=begun, has_tokens=True) for group_id, begun in in_flight.ended}
        self._closed = [group_id for group_id, _ in in_flight.ended]
        for one in (self._open | self._unscored).values():
            self._note_open(one)
        for begun, rollouts in sorted(self._ready.items()):
            for rollout in rollouts.values():
                self._groups.setdefault(rollout.completion.group_id, _Group(begun=begun)).has_tokens = True

    def _choose(self, batch: int) -> set[int] | None:
        ended = [self._groups[group_id].begun for group_id in self._closed]
        running = [group.begun for group in self._groups.values() if group.num_open]
        places = self._admission.choose(ended, running, batch)
        return None if places is None else {self._closed[place] for place in places}

    def _date_anew(self, phase: int) -> None:
        waiting = {group_id for group_id, group in self._groups.items() if not group.has_tokens}
        for group_id in waiting:
            self._groups[group_id].begun = phase
        for key, one in self._open.items():
            if one.request.group_id in waiting:
                self._open[key] = replace(one, batch=phase)
        if waiting:
            self._ready.setdefault(phase, {})

    def _note_open(self, one: OpenSample) -> None:
        group = self._groups.setdefault(one.request.group_id, _Group(begun=one.batch))
        group.num_open += 1
        group.has_tokens = group.has_tokens or one.so_far is not None
