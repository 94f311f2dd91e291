"""The free schedule: instances never wait for each other's samples, and new versions are taken whenever they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlhfspec.cluster.run.pipeline import InFlight, OpenSample, Pipeline
from rlhfspec.core.errors import WeightsError
from rlhfspec.core.records import Completion, Rollout, SampleKey, SampleRequest
from rlhfspec.policies.pipelining.free_admission import FreeAdmission


@dataclass(slots=True, kw_only=True)
class _Group:
    """The samples of one prompt: they are learned from together."""

    begun: int
    num_open: int = 0
    "without a reward"
    has_tokens: bool = False


class FreePipeline(Pipeline):
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
        """See `Pipeline.begin`. A group that is still in line, without a token, begins under this version."""
        self._date_anew(phase)
        num_begun = phase * self._admission.groups_per_batch + len(self._groups)
        num_more = max(self._admission.most_begun(phase) - num_begun, 0)
        if num_more:
            self._ready.setdefault(phase, {})
            begun = {r.key: OpenSample(batch=phase, request=r) for r in self._next_requests(num_more)}
            self._open |= begun
            for one in begun.values():
                self._note_open(one)
        return [self._turn(one, most=one.request.sampling.max_new_tokens) for one in self._open.values()]

    def whole(self, completion: Completion) -> tuple[SampleRequest, Completion] | None:
        """See `Pipeline.whole`."""
        one = super().whole(completion)
        if one is not None or completion.num_tokens:
            self._groups[completion.group_id].has_tokens = True
        return one

    def ended(self, key: SampleKey, rollout: Rollout | None) -> None:
        """See `Pipeline.ended`."""
        group_id = (self._unscored.get(key) or self._open[key]).request.group_id
        super().ended(key, rollout)
        group = self._groups[group_id]
        group.num_open, group.has_tokens = group.num_open - 1, True
        if not group.num_open:
            self._closed.append(group_id)

    def has(self, batch: int) -> bool:
        """See `Pipeline.has`."""
        return self._choose(batch) is not None

    def take(self, batch: int) -> list[Rollout]:
        """See `Pipeline.take`."""
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
        """See `Pipeline.in_flight`."""
        ended = tuple((group_id, self._groups[group_id].begun) for group_id in self._closed)
        return replace(super().in_flight(), ended=ended)

    def restore(self, in_flight: InFlight) -> None:
        """See `Pipeline.restore`."""
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
