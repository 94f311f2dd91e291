"""The central scheduler as a pure state machine: events in, orders out; no clock, no threads, no Ray.

Laws: every sample is delivered exactly once. A waiting sample is bound to an instance only when a
slot frees there (pull; design 3.3). A sample belongs to `(sample, epoch, owner)`: when its owner is
lost it is queued again with epoch + 1 and recomputed from its prompt to the same tokens, because a
rollout is a pure function of weights, prompt and key (design 3.1). A report with a stale epoch is
compared with the accepted one and dropped; a difference is an integrity alarm (design 3.4).
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from core.errors import RlhfSpecError
from core.records import Completion, InstanceLoad, SampleKey, SampleRequest
from policies.scheduler_records import (
    Abandon,
    Alarm,
    ClockTicked,
    Deliver,
    Event,
    InstanceGone,
    InstanceJoined,
    InstanceReported,
    InstanceSnapshot,
    Order,
    SamplesArrived,
    Submit,
)

_NO_TOKENS = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class OpenSample:
    """One line of the log of open samples: enough to generate it again anywhere."""

    arrival: int
    request: SampleRequest
    "its epoch is the current one"
    owner: str | None = None
    tokens: np.ndarray = field(default_factory=lambda: _NO_TOKENS)
    "response tokens at the last poll"
    stale: list[tuple[int, str, str]] = field(default_factory=list)
    "(epoch, instance, digest) of reports that came too late to be accepted, to be compared"


@dataclass(slots=True)
class _Member:
    num_slots: int
    last_seen_s: float
    owned: set[SampleKey] = field(default_factory=set)
    load: InstanceLoad | None = None


class Scheduler:
    """Admission, ownership and health of one pool of instances."""

    def __init__(self, *, heartbeat_timeout_s: float) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._open: dict[SampleKey, OpenSample] = {}
        self._waiting: list[tuple[int, SampleKey]] = []
        self._accepted: dict[SampleKey, tuple[int, str]] = {}
        self._members: dict[str, _Member] = {}
        self._num_arrived = 0

    @property
    def num_open(self) -> int:
        """Samples not yet delivered."""
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """Open samples without an owner."""
        return len(self._waiting)

    @property
    def num_delivered(self) -> int:
        """Samples delivered so far."""
        return len(self._accepted)

    def instances(self) -> dict[str, int]:
        """Living instances and the number of samples each owns."""
        return {name: len(member.owned) for name, member in sorted(self._members.items())}

    def open_samples(self) -> tuple[OpenSample, ...]:
        """The log of open samples in order of arrival."""
        return tuple(sorted(self._open.values(), key=lambda sample: sample.arrival))

    def loads(self) -> dict[str, InstanceLoad]:
        """The last load each living instance reported."""
        return {name: m.load for name, m in sorted(self._members.items()) if m.load is not None}

    def handle(self, event: Event) -> list[Order]:
        """Take one event, return the orders it gives rise to.

        Raises RlhfSpecError when a key arrives twice or an instance joins under a living one's name.
        """
        match event:
            case SamplesArrived():
                self._arrive(event.requests)
                orders: list[Order] = []
            case InstanceJoined():
                self._join(event)
                orders = []
            case InstanceReported():
                orders = self._report(event)
            case InstanceGone():
                orders = self._lose(event.instance, event.reason)
            case ClockTicked():
                orders = self._give_up_silent(event.now_s)
        return orders + self._pull()

    @classmethod
    def rebuild(
        cls,
        *,
        requests: Iterable[SampleRequest],
        delivered: Iterable[Completion],
        snapshots: Iterable[InstanceSnapshot],
        heartbeat_timeout_s: float,
        now_s: float,
    ) -> tuple[Scheduler, list[Order]]:
        """A scheduler that goes on where a dead one stopped.

        `requests` are the samples the loop asked for since it last had all, `delivered` those of them it
        has already received, `snapshots` what the living instances hold; what they finished for earlier
        requests has been received, and is dropped. A sample that two instances hold under one epoch
        belongs to neither and starts again under a higher one. Instances without a snapshot must be
        ended before: what they hold is given to others.
        """
        machine = cls(heartbeat_timeout_s=heartbeat_timeout_s)
        machine._arrive(tuple(requests))
        for completion in delivered:
            del machine._open[completion.key]
            machine._accepted[completion.key] = (completion.epoch, digest(completion))
        known = list(snapshots)
        for snapshot in known:
            machine._join(
                InstanceJoined(instance=snapshot.instance, num_slots=snapshot.num_slots, now_s=now_s)
            )
        for key, sample in machine._open.items():
            machine._adopt(key, sample, known)
        machine._waiting = [(s.arrival, k) for k, s in machine._open.items() if s.owner is None]
        heapq.heapify(machine._waiting)
        orders: list[Order] = []
        asked = set(machine._open) | set(machine._accepted)
        for snapshot in known:
            news = tuple(c for c in snapshot.completions if c.key in asked)
            report = InstanceReported(instance=snapshot.instance, now_s=now_s, completions=news)
            orders += machine._report(report)
        return machine, orders + machine._pull()

    def _arrive(self, requests: tuple[SampleRequest, ...]) -> None:
        for request in requests:
            if request.key in self._open or request.key in self._accepted:
                raise RlhfSpecError(
                    f"sample {request.key} was handed to the scheduler twice; expected every sample index "
                    "once; the data cursor must never reuse one"
                )
            self._open[request.key] = OpenSample(arrival=self._num_arrived, request=request)
            heapq.heappush(self._waiting, (self._num_arrived, request.key))
            self._num_arrived += 1

    def _join(self, event: InstanceJoined) -> None:
        if event.instance in self._members:
            raise RlhfSpecError(f"instance {event.instance} joined twice; a replacement needs a new name")
        self._members[event.instance] = _Member(num_slots=event.num_slots, last_seen_s=event.now_s)

    def _adopt(self, key: SampleKey, sample: OpenSample, snapshots: list[InstanceSnapshot]) -> None:
        epochs = {s.instance: s.open_epochs[key] for s in snapshots if key in s.open_epochs}
        epochs |= {s.instance: c.epoch for s in snapshots for c in s.completions if c.key == key}
        newest = max(epochs.values(), default=-1)
        holders = [instance for instance, epoch in epochs.items() if epoch == newest]
        if len(holders) == 1:
            sample.owner = holders[0]
            self._members[holders[0]].owned.add(key)
        epoch = newest if len(holders) == 1 else max(newest, sample.request.epoch) + 1
        sample.request = replace(sample.request, epoch=epoch)

    def _report(self, event: InstanceReported) -> list[Order]:
        member = self._members.get(event.instance)
        if member is not None:
            member.last_seen_s = max(member.last_seen_s, event.now_s)
            member.load = event.load or member.load
            for key, tokens in event.progress.items():
                if key in member.owned:
                    self._open[key].tokens = tokens
        orders: list[Order] = []
        for completion in event.completions:
            orders += self._complete(event.instance, completion)
        return orders

    def _complete(self, instance: str, completion: Completion) -> list[Order]:
        key, epoch = completion.key, completion.epoch
        if key in self._accepted:
            return self._compare(key, instance, epoch, digest(completion))
        sample = self._open.get(key)
        if sample is None:
            return [Alarm(key=key, instance=instance, epoch=epoch, what="a sample nobody asked for")]
        if epoch < sample.request.epoch:
            sample.stale.append((epoch, instance, digest(completion)))
            return []
        if epoch > sample.request.epoch or sample.owner != instance:
            what = f"reported under epoch {epoch}; its owner is {sample.owner}, epoch {sample.request.epoch}"
            return [Alarm(key=key, instance=instance, epoch=epoch, what=what)]
        self._members[instance].owned.remove(key)
        self._accepted[key] = (epoch, digest(completion))
        orders: list[Order] = [Deliver(completion=completion)]
        for stale_epoch, stale_instance, stale_digest in self._open.pop(key).stale:
            orders += self._compare(key, stale_instance, stale_epoch, stale_digest)
        return orders

    def _compare(self, key: SampleKey, instance: str, epoch: int, other: str) -> list[Order]:
        accepted_epoch, accepted = self._accepted[key]
        if other == accepted:
            return []
        what = f"tokens or log-probabilities differ from those accepted under epoch {accepted_epoch}"
        return [Alarm(key=key, instance=instance, epoch=epoch, what=what)]

    def _lose(self, instance: str, reason: str) -> list[Order]:
        member = self._members.pop(instance, None)
        if member is None:
            return []
        for key in member.owned:
            sample = self._open[key]
            sample.owner = None
            sample.tokens = _NO_TOKENS
            sample.request = replace(sample.request, epoch=sample.request.epoch + 1)
            heapq.heappush(self._waiting, (sample.arrival, key))
        return [Abandon(instance=instance, reason=reason, num_requeued=len(member.owned))]

    def _give_up_silent(self, now_s: float) -> list[Order]:
        orders: list[Order] = []
        for name, member in sorted(self._members.items()):
            silent_s = now_s - member.last_seen_s
            if silent_s > self._heartbeat_timeout_s:
                orders += self._lose(name, f"silent for {silent_s:.0f} s")
        return orders

    def _pull(self) -> list[Order]:
        """Bind waiting samples, oldest first, each to the instance that owns fewest."""
        given: dict[str, list[SampleRequest]] = {}
        while self._waiting:
            free = [(len(m.owned), name) for name, m in self._members.items() if len(m.owned) < m.num_slots]
            if not free:
                break
            _, key = heapq.heappop(self._waiting)
            _, name = min(free)
            self._open[key].owner = name
            self._members[name].owned.add(key)
            given.setdefault(name, []).append(self._open[key].request)
        return [Submit(instance=name, requests=tuple(requests)) for name, requests in given.items()]


def digest(completion: Completion) -> str:
    """Hex digest of what must not depend on where or under which plan a sample was generated."""
    state = hashlib.blake2b(str(completion.finish_reason).encode(), digest_size=16)
    for array in (completion.token_ids, completion.policy_logprobs, completion.sampling_logprobs):
        state.update(np.ascontiguousarray(array).tobytes())
        state.update(b"|")
    return state.hexdigest()
