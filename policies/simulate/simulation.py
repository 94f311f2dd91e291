"""A rollout on simulated instances, event by event: samples end, slots free, polls come, moves begin and arrive."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum

import numpy as np

from core.records import SampleKey, Stream
from policies.reallocation.pool_records import InstanceView, Move, MoveMode, PoolView, ReallocationPolicy
from policies.simulate.simulated_instance import PaceLine, SimulatedInstance
from policies.simulate.simulated_size import SimulatedSize
from policies.simulate.simulation_records import Binding, PoolSetup, Samples, SimulationResult


class _Kind(IntEnum):
    """Events of one moment are handled in this order."""

    END = 0
    ARRIVE = 1
    JOIN = 2
    ORDER = 3
    STARTED = 4
    POLL = 5


def simulate(
    samples: Samples,
    setup: PoolSetup,
    policy: ReallocationPolicy,
    *,
    binding: Binding = "pull",
    progress: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Run all samples to their end.

    Args:
        samples: with their true lengths, which the policy does not see.
        setup: the pool.
        policy: asked at every poll.
        binding: of samples to instances.
        progress: told the number of finished samples at every poll.
    """
    return _Simulation(samples, setup, policy, binding, progress).run()


class _Simulation:
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
        self._to_go = samples.response_tokens / samples.speed
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

    def run(self) -> SimulationResult:
        """Handle events until the last sample is done."""
        self._bind(0.0)
        self._push(self._setup.poll_interval_s, _Kind.POLL)
        now_s = 0.0
        while self._num_done < len(self._samples):
            now_s, kind, _, payload = heapq.heappop(self._events)
            match kind:
                case _Kind.END:
                    self._end(now_s, *payload)
                case _Kind.ARRIVE:
                    self._arrive(now_s, *payload)
                case _Kind.JOIN:
                    self._join(now_s, *payload)
                case _Kind.ORDER:
                    self._begin(now_s, *payload)
                case _Kind.STARTED:
                    self._size.joined(payload[0])
                    self._bind(now_s)
                case _Kind.POLL:
                    self._poll(now_s)
            if self._alone_line is not None:
                self._share_machine(now_s, self._alone_line)
        for instance in self._instances:
            instance.advance(now_s)
        return SimulationResult(
            finish_s=now_s,
            busy_s=np.array([instance.busy_s for instance in self._instances]),
            num_tokens=int(self._samples.response_tokens.sum()),
            num_moves=self._counts["moves"],
            num_migrated=self._counts["migrated"],
            num_recomputed=self._counts["recomputed"],
            num_void=self._counts["void"],
            instance_s=self._size.instance_s(now_s),
            resizes=tuple(self._size.resizes),
        )

    def _share_machine(self, now_s: float, alone_line: PaceLine) -> None:
        """An instance has the machine for itself while no other has work."""
        num_busy = sum(bool(instance.running) for instance in self._instances)
        for k, instance in enumerate(self._instances):
            line = alone_line if num_busy == 1 and instance.running else self._line
            if line is not instance.line:
                instance.advance(now_s)
                instance.line = line
                self._reschedule(k)

    def _push(self, at_s: float, kind: _Kind, *payload: object) -> None:
        heapq.heappush(self._events, (at_s, int(kind), self._num_events, payload))
        self._num_events += 1

    def _reschedule(self, k: int) -> None:
        """The instance has changed: what was expected of it no longer holds."""
        self._versions[k] += 1
        self._view_keys.pop(k, None)
        following = self._instances[k].next_end()
        if following is not None:
            self._push(following[0], _Kind.END, k, following[1], self._versions[k])

    def _bind(self, now_s: float) -> None:
        """Give waiting samples to free slots."""
        free = (self._owned < self._setup.num_slots) & self._size.admits
        if len(self._queues) > 1:
            for k in np.nonzero(free)[0].tolist():
                queue = self._queues[k]
                while queue and self._owned[k] < self._setup.num_slots:
                    self._admit(now_s, queue.popleft(), k)
            return
        queue = self._queues[0]
        while queue and free.any():
            k = int(np.where(free, self._owned, np.iinfo(np.int64).max).argmin())
            self._admit(now_s, queue.popleft(), k)
            free[k] = self._owned[k] < self._setup.num_slots

    def _admit(self, now_s: float, sample: int, k: int) -> None:
        instance = self._instances[k]
        instance.advance(now_s)
        self._owned[k] += 1
        prompt_s = float(self._samples.prompt_tokens[sample]) * self._setup.prompt_token_s
        if prompt_s > 0:
            instance.block(prompt_s)
        self._add(sample, k, float(self._to_go[sample]), float(self._samples.prompt_tokens[sample]))
        self._reschedule(k)

    def _add(self, sample: int, k: int, to_go: float, context_tokens: float) -> None:
        speed = float(self._samples.speed[sample])
        self._instances[k].add(sample, to_go, context_tokens=context_tokens, speed=speed)

    def _end(self, now_s: float, k: int, sample: int, version: int) -> None:
        if version != self._versions[k]:
            return
        self._instances[k].advance(now_s)
        self._instances[k].remove(sample)
        self._num_done += 1
        self._policy.note_finished(int(self._samples.response_tokens[sample]))
        self._size.note_finished(int(self._samples.response_tokens[sample]))
        self._free(now_s, k)

    def _free(self, now_s: float, k: int) -> None:
        self._owned[k] -= 1
        self._reschedule(k)
        if any(self._queues):
            self._bind(now_s)

    def _poll(self, now_s: float) -> None:
        if self._progress is not None:
            self._progress(self._num_done)
        view = self._view(now_s)
        for k in self._size.plan(view):
            self._push(now_s + self._size.start_up_s, _Kind.STARTED, k)
        moves = self._size.moves_away(view) + self._policy.plan(view)
        if moves:
            self._push(now_s + self._setup.order_delay_s, _Kind.ORDER, moves)
        self._push(now_s + self._setup.poll_interval_s, _Kind.POLL)

    def _begin(self, now_s: float, moves: tuple[Move, ...]) -> None:
        """Start the moves; those whose sample or slot is gone by now are dropped."""
        truth = self._setup.moves
        for move in moves:
            source, destination = self._number[move.source], self._number[move.destination]
            sample = move.key.sample_index
            here, there = self._instances[source], self._instances[destination]
            gone = sample not in here.running or sample in self._leaving or not self._size.admits[destination]
            if gone or self._owned[destination] >= self._setup.num_slots:
                continue
            self._counts["moves"] += 1
            self._owned[destination] += 1
            self._arriving[destination] += 1
            here.advance(now_s)
            there.advance(now_s)
            # whole tokens; sums of times may fall just short of one
            context = int(here.context_of(sample) + 1e-6)
            if move.mode is MoveMode.RECOMPUTE:
                self._counts["recomputed"] += 1
                seconds = float(truth.prefill.seconds(context))
                left = here.remove(sample)
                self._push(there.block(seconds), _Kind.JOIN, destination, sample, left)
                self._policy.note_prefill(num_tokens=context, seconds=seconds)
                self._free(now_s, source)
            else:
                cold = (move.source, move.destination) not in self._warm
                self._warm.add((move.source, move.destination))
                num_bytes = int(context * truth.kv_bytes_per_token)
                seconds = float(truth.transfer.seconds(num_bytes, cold=cold))
                self._leaving[sample] = source
                here.num_transfers += 1
                there.num_transfers += 1
                payload = (source, destination, sample, num_bytes, seconds, cold)
                self._push(now_s + seconds, _Kind.ARRIVE, *payload)
                self._reschedule(source)
            self._reschedule(destination)

    def _arrive(
        self,
        now_s: float,
        source: int,
        destination: int,
        sample: int,
        num_bytes: int,
        seconds: float,
        cold: bool,
    ) -> None:
        """The caches of a migration are there: hand over, if there still is anything to."""
        here, there = self._instances[source], self._instances[destination]
        here.advance(now_s)
        there.advance(now_s)
        here.num_transfers -= 1
        there.num_transfers -= 1
        del self._leaving[sample]
        self._policy.note_transfer(num_bytes=num_bytes, seconds=seconds, cold=cold)
        if sample in here.running:
            self._counts["migrated"] += 1
            left = here.remove(sample)
            self._push(now_s + self._setup.moves.downtime_s, _Kind.JOIN, destination, sample, left)
            self._free(now_s, source)
            self._reschedule(destination)
        else:
            self._counts["void"] += 1
            self._arriving[destination] -= 1
            self._reschedule(source)
            self._free(now_s, destination)

    def _join(self, now_s: float, destination: int, sample: int, left: tuple[float, float]) -> None:
        self._instances[destination].advance(now_s)
        self._arriving[destination] -= 1
        self._add(sample, destination, *left)
        self._reschedule(destination)

    def _view(self, now_s: float) -> PoolView:
        views = []
        for k, instance in enumerate(self._instances):
            instance.advance(now_s)
            self._size.look(k, now_s, is_empty=not self._owned[k])
            if self._size.is_there[k]:
                views.append(self._instance_view(k, instance, now_s))
        return PoolView(
            now_s=now_s,
            instances=tuple(views),
            num_queued=sum(map(len, self._queues)),
            max_new_tokens=self._setup.max_new_tokens,
            warm_pairs=frozenset(self._warm),
        )

    def _instance_view(self, k: int, instance: SimulatedInstance, now_s: float) -> InstanceView:
        if k not in self._view_keys:
            here = sorted(sample for sample in instance.running if sample not in self._leaving)
            self._view_keys[k] = (np.array(here, dtype=np.int64), tuple(self._keys[s] for s in here))
        here, keys = self._view_keys[k]
        ends = np.array([instance.running[s] for s in here.tolist()])
        to_go = (ends - instance.progress) * self._samples.speed[here]
        # what is not quite done has not ended
        done = np.maximum(self._samples.response_tokens[here] - np.ceil(to_go - 1e-9), 0).astype(np.int64)
        num_running = len(instance.running)
        return InstanceView(
            instance=self._names[k],
            num_slots=self._setup.num_slots if self._size.admits[k] else 0,
            keys=keys,
            response_tokens=done,
            context_tokens=done + self._samples.prompt_tokens[here],
            num_arriving=int(self._arriving[k]),
            num_leaving=num_running - len(keys),
            goodput_tokens_per_s=instance.goodput,
            goodput_samples=float(num_running),
            idle_s=self._size.idle_s(k, now_s),
            is_leaving=not self._size.admits[k],
        )
