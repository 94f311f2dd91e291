"""The instances of a simulated rollout: samples are bound, run, end, are told of; the trainer works beside them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum

import numpy as np

from rlhfspec.core.records import SampleKey, Stream
from rlhfspec.policies.reallocation.pool_records import ReallocationPolicy
from rlhfspec.policies.scheduling.ledger import AHEAD_SHARE
from rlhfspec.policies.simulate.simulated_instance import PaceLine, SimulatedInstance, TrainerWork
from rlhfspec.policies.simulate.simulated_size import SimulatedSize
from rlhfspec.policies.simulate.simulation_records import Binding, PoolSetup, Samples


class Kind(IntEnum):
    """Events of one moment are handled in this order."""

    END = 0
    ARRIVE = 1
    JOIN = 2
    REPORT = 3
    TOLD = 4
    SUBMIT = 5
    ORDER = 6
    STARTED = 7
    LEARNED = 8
    LOADED = 9
    POLL = 10


class SimulatedPool:
    """What happens to samples but for moves; whoever derives from it hands it the events."""

    def __init__(
        self,
        samples: Samples,
        setup: PoolSetup,
        policy: ReallocationPolicy,
        binding: Binding,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._samples, self._setup, self._policy, self._progress = samples, setup, policy, progress
        # samples that are bound beforehand leave nothing for whoever comes later
        self._size = SimulatedSize(setup if binding == "pull" else replace(setup, elastic=None))
        most = self._size.most
        self._line = PaceLine.of(setup.curve, setup.num_slots)
        self._alone_line = setup.alone_curve and PaceLine.of(setup.alone_curve, setup.num_slots)
        self._instances = [SimulatedInstance(self._line, setup.moves.bystander_share) for _ in range(most)]
        self._names = tuple(f"gen-{k:04d}" for k in range(most))
        self._number = {name: k for k, name in enumerate(self._names)}
        self._keys = [
            SampleKey(run_seed=0, stream=Stream.BENCH, sample_index=index) for index in range(len(samples))
        ]
        self._to_go = samples.response_tokens / samples.speed + setup.last_step_tokens
        self._context = samples.prompt_tokens
        self._lines: list[deque[int]] = [deque() for _ in range(most)]
        "samples that an instance has and does not run yet"
        self._untold: list[list[int]] = [[] for _ in range(most)]
        "samples that have ended there, and the scheduler does not know it"
        self._answered_s = np.full(most, -np.inf)
        self._learner = TrainerWork()
        self._factor = 1.0 if setup.machine is None else setup.machine.factor(setup.num_instances)
        "how many times as long everything takes now as with one at work"
        self._learning = 0
        "counts changes of what was expected of the trainer"
        self._learner_done_s = 0.0
        self._known_paces: dict[float, PaceLine] = {1.0: self._line}
        self._arriving = np.zeros(most, dtype=np.int64)
        self._owned = np.zeros(most, dtype=np.int64)
        self._leaving: dict[int, int] = {}
        "sample -> source, while its caches are on their way"
        self._warm: set[tuple[str, str]] = set()
        self._view_keys: dict[int, tuple[np.ndarray, tuple[SampleKey, ...]]] = {}
        self._versions = [0] * most
        self._events: list[tuple[float, int, int, tuple]] = []
        self._num_events = 0
        self._num_done = 0
        self._counts = dict.fromkeys(("moves", "migrated", "recomputed", "void"), 0)
        self._queues: list[deque[int]]
        if binding == "static":
            ways = range(setup.num_instances)
            self._queues = [deque(range(k, len(samples), setup.num_instances)) for k in ways]
        else:
            self._queues = [deque(range(len(samples)))]

    def _push(self, at_s: float, kind: Kind, *payload: object) -> None:
        heapq.heappush(self._events, (at_s, int(kind), self._num_events, payload))
        self._num_events += 1

    def _reschedule(self, k: int) -> None:
        """The instance has changed: what was expected of it no longer holds."""
        self._versions[k] += 1
        self._view_keys.pop(k, None)
        following = self._instances[k].next_end()
        if following is not None:
            self._push(following[0], Kind.END, k, following[1], self._versions[k])

    def _bind(self, now_s: float) -> None:
        """Give waiting samples to free slots, and a few to wait there where instances tell late."""
        slots, given = self._setup.num_slots, {}
        if len(self._queues) > 1:
            for k in np.nonzero((self._owned < slots) & self._size.admits)[0].tolist():
                queue = self._queues[k]
                while queue and self._owned[k] < slots:
                    self._give(queue.popleft(), k, given)
        else:
            queue = self._queues[0]
            ahead = slots // AHEAD_SHARE if self._setup.report_interval_s else 0
            share = 2 * self._setup.num_instances
            free = (self._owned < slots + min(ahead, len(queue) // share)) & self._size.admits
            while queue and free.any():
                k = int(np.where(free, self._owned, np.iinfo(np.int64).max).argmin())
                self._give(queue.popleft(), k, given)
                free[k] = self._owned[k] < slots + min(ahead, len(queue) // share)
        for k, taken in given.items():
            if self._setup.message_s:
                self._push(now_s + self._setup.message_s, Kind.SUBMIT, k, taken)
            else:
                self._submit(now_s, k, taken)

    def _give(self, sample: int, k: int, given: dict[int, list[int]]) -> None:
        self._owned[k] += 1
        given.setdefault(k, []).append(sample)

    def _submit(self, now_s: float, k: int, taken: list[int]) -> None:
        self._lines[k].extend(taken)
        self._start_next(now_s, k)

    def _start_next(self, now_s: float, k: int) -> None:
        """Samples in line take the slots that are free."""
        instance, line = self._instances[k], self._lines[k]
        if not line:
            return
        instance.advance(now_s)
        while line and len(instance.running) < self._setup.num_slots:
            sample = line.popleft()
            tokens = float(self._context[sample])
            prompt_s = tokens * self._setup.prompt_token_s + self._setup.prompt_s
            if prompt_s > 0 and not self._shares_prompt(sample, k):
                instance.block(prompt_s * self._stretch)
            self._add(sample, k, float(self._to_go[sample]), tokens)
        self._reschedule(k)

    def _shares_prompt(self, sample: int, k: int) -> bool:
        """Whether another sample of the prompt runs there, whose caches are copied."""
        group = self._samples.group
        if group is None or group[sample] < 0:
            return False
        return any(group[other] == group[sample] for other in self._instances[k].running)

    def _add(self, sample: int, k: int, to_go: float, context_tokens: float) -> None:
        speed = float(self._samples.speed[sample])
        self._instances[k].add(sample, to_go, context_tokens=context_tokens, speed=speed)

    def _end(self, now_s: float, k: int, sample: int, version: int) -> None:
        if version != self._versions[k]:
            return
        self._instances[k].advance(now_s)
        self._instances[k].remove(sample)
        self._reschedule(k)
        self._start_next(now_s, k)
        if not self._setup.report_interval_s and not self._setup.message_s:
            self._told(now_s, k, [sample])
            return
        self._untold[k].append(sample)
        is_last = not self._instances[k].running and not self._lines[k]
        if len(self._untold[k]) == 1 or is_last:
            at_s = max(now_s, self._answered_s[k] + self._setup.report_interval_s)
            self._push(now_s if is_last else at_s, Kind.REPORT, k)

    def _report(self, now_s: float, k: int) -> None:
        """An instance answers a poll: what has ended there."""
        if self._untold[k]:
            self._answered_s[k] = now_s
            self._push(now_s + self._setup.message_s, Kind.TOLD, k, self._untold[k])
            self._untold[k] = []

    def _told(self, now_s: float, k: int, ended: list[int]) -> None:
        """The scheduler hears of samples that have ended."""
        for sample in ended:
            self._num_done += 1
            self._policy.note_finished(int(self._samples.response_tokens[sample]))
            self._size.note_finished(int(self._samples.response_tokens[sample]))
        self._owned[k] -= len(ended)
        if any(self._queues):
            self._bind(now_s)

    def _free(self, now_s: float, k: int) -> None:
        self._owned[k] -= 1
        self._reschedule(k)
        self._start_next(now_s, k)
        if any(self._queues):
            self._bind(now_s)

    def _share_machine(self, now_s: float) -> None:
        """Instances and trainer are as fast as the others let them."""
        num_busy = sum(instance.is_busy(now_s) for instance in self._instances)
        machine, line = self._setup.machine, self._line
        if machine is not None:
            factor = machine.factor(num_busy, trainer=self._learner.is_busy)
            if factor != self._factor:
                self._factor = factor
                self._expect_learner()
            line = self._paces(self._stretch)
        for k, instance in enumerate(self._instances):
            own = line
            if self._alone_line is not None and num_busy == 1 and instance.running:
                own = self._alone_line
            if own is not instance.line:
                instance.advance(now_s)
                instance.line = own
                self._reschedule(k)

    @property
    def _stretch(self) -> float:
        """How many times as long everything takes as in the setup, whose seconds are of all instances busy."""
        machine = self._setup.machine
        return 1.0 if machine is None else self._factor / machine.factor(self._setup.num_instances)

    def _paces(self, factor: float) -> PaceLine:
        if factor not in self._known_paces:
            self._known_paces[factor] = self._line.times(factor)
        return self._known_paces[factor]

    def _learn(self, now_s: float, seconds: float) -> None:
        """The trainer begins an update."""
        self._learner.begin(now_s, seconds)
        self._expect_learner()

    def _expect_learner(self) -> None:
        self._learning += 1
        if self._learner.is_busy:
            self._push(self._learner.end_s(self._factor), Kind.LEARNED, self._learning)

    def _learned(self, now_s: float, expected: int) -> None:
        if expected == self._learning:
            self._learner_done_s = now_s
            self._learner.begin(now_s, 0.0)

    def _learner_end_s(self, now_s: float) -> float:
        if not self._learner.is_busy:
            return self._learner_done_s
        self._learner.advance(now_s, self._factor)
        return self._learner.end_s(
            1.0 if self._setup.machine is None else self._setup.machine.factor(0, trainer=True)
        )
