"""A rollout on simulated instances, event by event: samples end, slots free, polls come, moves begin and arrive."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from rlhfspec.policies.reallocation.pool_records import (
    InstanceView,
    Move,
    MoveMode,
    PoolView,
    ReallocationPolicy,
)
from rlhfspec.policies.simulate.simulated_instance import SimulatedInstance
from rlhfspec.policies.simulate.simulated_pool import Kind, SimulatedPool
from rlhfspec.policies.simulate.simulation_records import Binding, PoolSetup, Samples, SimulationResult


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
    return RolloutSimulation(samples, setup, policy, binding, progress).run()


class RolloutSimulation(SimulatedPool):
    """The events of one rollout; `played_steps` has those of many that run into one another."""

    def run(self) -> SimulationResult:
        """Handle events until the last sample is done."""
        self._begin_run()
        self._push(self._setup.poll_interval_s, Kind.POLL)
        now_s = 0.0
        while not self._is_over():
            now_s, kind, _, payload = heapq.heappop(self._events)
            self._learner.advance(now_s, self._factor)
            self._handle(now_s, Kind(kind), payload)
            if self._alone_line is not None or self._setup.machine is not None:
                self._share_machine(now_s)
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
            learner_end_s=self._learner_end_s(now_s),
            resizes=tuple(self._size.resizes),
        )

    def _begin_run(self) -> None:
        """What there is at the start."""
        if self._setup.learner_s:
            self._learn(0.0, self._setup.learner_s)
        self._bind(0.0)
        self._share_machine(0.0)

    def _is_over(self) -> bool:
        return self._num_done == len(self._samples)

    def _handle(self, now_s: float, kind: Kind, payload: tuple) -> None:
        match kind:
            case Kind.END:
                self._end(now_s, *payload)
            case Kind.ARRIVE:
                self._arrive(now_s, *payload)
            case Kind.JOIN:
                self._join(now_s, *payload)
            case Kind.REPORT:
                self._report(now_s, *payload)
            case Kind.TOLD:
                self._told(now_s, *payload)
            case Kind.SUBMIT:
                self._submit(now_s, *payload)
            case Kind.ORDER:
                self._begin(now_s, *payload)
            case Kind.STARTED:
                self._size.joined(payload[0])
                self._bind(now_s)
            case Kind.LEARNED:
                self._learned(now_s, *payload)
            case Kind.LOADED:
                self._loaded(now_s)
            case Kind.POLL:
                self._poll(now_s)

    def _loaded(self, now_s: float) -> None:
        """New weights are in the instances: not within one rollout."""
        raise AssertionError("a rollout is of one version")

    def _poll(self, now_s: float) -> None:
        if self._progress is not None:
            self._progress(self._num_done)
        view = self._view(now_s)
        for k in self._size.plan(view):
            self._push(now_s + self._size.start_up_s, Kind.STARTED, k)
        moves = self._size.moves_away(view) + self._policy.plan(view)
        if moves:
            self._push(now_s + self._setup.order_delay_s, Kind.ORDER, moves)
        self._push(now_s + self._setup.poll_interval_s, Kind.POLL)

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
                self._push(there.block(seconds), Kind.JOIN, destination, sample, left)
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
                self._push(now_s + seconds, Kind.ARRIVE, *payload)
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
            self._push(now_s + self._setup.moves.downtime_s, Kind.JOIN, destination, sample, left)
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
