"""Attempts at the next batch under the weights that there are: where they run, and what becomes of them.

They are in no ledger. Nobody waits for one, none is moved or given back, and a sample takes any slot of theirs: the
engine ends them by itself and reports how far they got. What they gave is a draft for the sample of the same key.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

import numpy as np

from ...core.records import ATTEMPT_EPOCH, Completion, FinishReason, SampleKey, SampleRequest
from .events import Order, Submit
from .ledger import Ledger
from .look_ahead import LookAheadLaw


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptCounts:
    """Since the scheduler began; subtract two for what was between."""

    num_attempts: int = 0
    "given to instances"
    num_attempted_tokens: int = 0
    "that instances reported of them"
    num_drafts: int = 0
    "samples that were delivered and had one"
    num_draft_tokens: int = 0
    "of these drafts"
    num_proved_tokens: int = 0
    "of the drafts' tokens, those before the first that differs from the sample's"

    def __sub__(self, other: AttemptCounts) -> AttemptCounts:
        names = self.__dataclass_fields__
        return AttemptCounts(**{name: getattr(self, name) - getattr(other, name) for name in names})


class Attempts:
    """Of one scheduler."""

    def __init__(self, law: LookAheadLaw | None) -> None:
        """`law` says how many an instance runs; None: there are none."""
        self.law = law
        self._announced: dict[SampleKey, SampleRequest] = {}
        "of the next batch, those that were not asked for"
        self._waiting: dict[SampleKey, SampleRequest] = {}
        "of these the ones that were not placed, in order"
        self._placed: dict[SampleKey, str] = {}
        "with an instance, until that reports it"
        self._loads = Counter[str]()
        "number of them by instance"
        self._drafts: dict[SampleKey, np.ndarray] = {}
        self._drafted: set[SampleKey] = set()
        "open samples whose draft is from an attempt"
        self._is_closed = False
        self._batch = self._attempts = self._tokens = 0
        self._num_drafts = self._draft_tokens = self._proved = 0

    @property
    def counts(self) -> AttemptCounts:
        """So far."""
        return AttemptCounts(
            num_attempts=self._attempts,
            num_attempted_tokens=self._tokens,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._draft_tokens,
            num_proved_tokens=self._proved,
        )

    def announce(self, requests: Iterable[SampleRequest], open_samples: Container[SampleKey]) -> None:
        """Take note of the next batch, and drop what is kept of the one before that nobody asked for."""
        if self.law is None:
            return
        self.law.next_batch()
        self._is_closed = False
        self._announced = {
            request.key: replace(request, is_attempt=True, epoch=ATTEMPT_EPOCH)
            for request in requests
            if request.key not in open_samples
        }
        self._batch = len(self._announced)
        self._drafts = {key: draft for key, draft in self._drafts.items() if key in self._announced}
        self._drafted = {key for key in self._drafted if key in open_samples}
        self._queue(self._announced.keys() - self._placed.keys() - self._drafts.keys())

    def close(self) -> None:
        """Begin no more of the batch: weights are published, under which nothing is ahead of anything."""
        self._waiting = {}
        self._is_closed = True

    def place(self, ledger: Ledger, names: Iterable[str] | None) -> list[Order]:
        """Give instances as many as the law says, the emptiest first; `names`: to these alone, None: to all."""
        serving, leaving = ledger.members.serving, ledger.members.leaving
        if gone := self._loads.keys() - serving.keys():
            lost = {key for key, name in self._placed.items() if name in gone}
            for key in lost:
                self._end(key)
            if not self._is_closed:
                self._queue(lost | self._waiting.keys())
        if self.law is None or not self._waiting or ledger.waiting:
            return []
        batch = -(-self._batch // max(len(serving) - len(leaving), 1))
        room: list[tuple[int, str, int]] = []
        for name in serving if names is None else names:
            member = serving.get(name)
            if member is None or name in leaving:
                continue
            samples, attempts = len(member.owned) + ledger.moves.num_arriving(name), self._loads[name]
            most = self.law.num_attempts(
                num_running=samples,
                num_free=member.num_slots - samples,
                batch=min(batch, member.num_slots),
                is_learning=not ledger.samples,
            )
            if most > attempts:
                room.append((samples + attempts, name, most - attempts))
        heapq.heapify(room)
        given: dict[str, list[SampleRequest]] = {}
        for key in list(self._waiting):
            if not room:
                break
            load, name, left = room[0]
            given.setdefault(name, []).append(self._waiting.pop(key))
            self._placed[key] = name
            self._loads[name] += 1
            if left > 1:
                heapq.heapreplace(room, (load + 1, name, left - 1))
            else:
                heapq.heappop(room)
        self._attempts += sum(map(len, given.values()))
        return [Submit(instance=name, requests=tuple(requests)) for name, requests in given.items()]

    def take(self, instance: str, completion: Completion) -> None:
        """Keep what came of an attempt, whole or cut, where its sample was not asked for; the longest of several."""
        key, tokens = completion.key, completion.token_ids
        if self._placed.get(key) == instance:
            self._end(key)
        self._tokens += len(tokens)
        if key not in self._announced:
            return
        self._waiting.pop(key, None)
        if len(tokens) > len(self._drafts.get(key, ())):
            self._drafts[key] = tokens

    def draft_for(self, request: SampleRequest) -> SampleRequest:
        """The request with its draft, if there is one; attempts at it are over."""
        key = request.key
        if self._announced.pop(key, None) is None:
            return request
        self._waiting.pop(key, None)
        self._end(key)
        # fresher than what the request brings of an earlier run
        if (draft := self._drafts.pop(key, None)) is None:
            return request
        self._drafted.add(key)
        return replace(request, draft=draft)

    def compare(self, request: SampleRequest, completion: Completion) -> None:
        """Compare a delivered sample with the draft that it was given."""
        if completion.key not in self._drafted or request.draft is None or self.law is None:
            return
        self._drafted.remove(completion.key)
        draft, tokens = request.draft, completion.token_ids
        if completion.finish_reason is FinishReason.CUT:
            # of what was not sampled nobody knows
            draft = draft[: len(tokens)]
        num_same = min(len(draft), len(tokens))
        different = np.flatnonzero(draft[:num_same] != tokens[:num_same])
        num_proved = int(different[0]) if len(different) else num_same
        self._num_drafts += 1
        self._draft_tokens += len(draft)
        self._proved += num_proved
        self.law.observe(len(draft), num_proved)

    def _queue(self, keys: Container[SampleKey]) -> None:
        """These are to be placed, in the order in which they were announced."""
        self._waiting = {key: request for key, request in self._announced.items() if key in keys}

    def _end(self, key: SampleKey) -> None:
        name = self._placed.pop(key, None)
        if name is not None:
            self._loads[name] -= 1
            if not self._loads[name]:
                del self._loads[name]
