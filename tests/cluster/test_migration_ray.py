"""Forced moves between real actors, over Gloo and over the object store; instances and the scheduler killed meanwhile.

The law: every sample completes once, to the bits that one process makes alone.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import ray
import tiny_pool
from forced_moves import Forced

from rlhfspec.actors.actor_messages import GenerationSpec, LostInstance, SchedulerSettings
from rlhfspec.actors.generation.generation_actor import GenerationActor
from rlhfspec.actors.scheduling.scheduler_actor import SchedulerActor
from rlhfspec.actors.transport.select import TransportName
from rlhfspec.cluster.system.instance_table import Instance, InstanceTable
from rlhfspec.cluster.system.scheduler_client import SchedulerClient
from rlhfspec.cluster.weights.publish import PublishedWeights, publish
from rlhfspec.core.config import EngineConfig, ReallocationConfig, SpeculationConfig
from rlhfspec.core.records import Completion, Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.weights.chunks import pack_weights
from rlhfspec.policies.scheduling.events import Alarm, MoveRecord

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NEW_TOKENS = 350
MAX_TOTAL_TOKENS = NEW_TOKENS + 20
TIMEOUT_S = 120.0
ENGINE = EngineConfig(device="cpu", max_running_samples=24, probe=False)


@dataclass
class Outcome:
    """What came out of one rollout."""

    completions: list[Completion] = field(default_factory=list)
    moves: list[MoveRecord] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    lost: list[LostInstance] = field(default_factory=list)

    @property
    def num_moved(self) -> int:
        return sum(record.outcome == "moved" for record in self.moves)


class RayPool:
    """Generation actors under one scheduler client, with a policy that moves samples all the time."""

    def __init__(self, transport: TransportName, num_instances: int) -> None:
        self.handles = {
            f"gen-{number}": GenerationActor.options(num_cpus=0.3).remote(
                GenerationSpec(
                    instance=f"gen-{number}",
                    engine=ENGINE,
                    speculation=SpeculationConfig(policy="fixed", num_nodes=3, depth=3, branching=1),
                    dtype="float32",
                    max_total_tokens=MAX_TOTAL_TOKENS,
                    vocab_size=tiny_pool.VOCAB_SIZE,
                    report_interval_s=0.01,
                    migration=ReallocationConfig(
                        transport=transport, timeout_s=3.0, frame_bytes=1 << 10, transfer_share=1.0
                    ),
                )
            )
            for number in range(num_instances)
        }
        self.pids: dict[str, Any] = {
            name: ray.get(handle.__ray_call__.remote(lambda actor: os.getpid()), timeout=TIMEOUT_S)
            for name, handle in self.handles.items()
        }
        self.sentinels = [handle.run.remote() for handle in self.handles.values()]
        packed = [
            pack_weights(tiny_pool.target(), name="target", weight_version=0),
            pack_weights(tiny_pool.draft(), name="draft", weight_version=0),
        ]
        for manifest, chunks in packed:
            refs = tuple(ray.put(chunk) for chunk in chunks)
            weights = PublishedWeights(manifest=manifest, chunk_refs=refs)
            assert publish(weights, self.handles, timeout_s=TIMEOUT_S) == {}
        self.client = SchedulerClient(
            lambda settings: SchedulerActor.options(num_cpus=0.1).remote(settings),
            SchedulerSettings(
                poll_interval_s=0.02,
                heartbeat_timeout_s=60.0,
                order_timeout_s=TIMEOUT_S,
                reallocation=Forced(share=0.5),
                reallocation_interval_s=0.02,
            ),
            InstanceTable(
                {
                    name: Instance(handle=handle, num_slots=ENGINE.max_running_samples)
                    for name, handle in self.handles.items()
                }
            ),
            max_restarts=2,
            start_timeout_s=TIMEOUT_S,
        )
        for name in self.handles:
            self.client.join(name)

    def run(
        self,
        requests: Sequence[SampleRequest],
        strike: Callable[[Outcome], bool] = lambda out: True,
        then: Sequence[SampleRequest] = (),
    ) -> Outcome:
        """Generate all; `strike` is called after each take until it has done its work, `then` is asked for then."""
        outcome, struck = Outcome(), False
        self.client.enqueue(tuple(requests))
        ends_s = time.monotonic() + TIMEOUT_S
        while len(outcome.completions) < len(requests) + len(then):
            assert time.monotonic() < ends_s, f"{len(outcome.completions)} of {len(requests)} completions"
            taken = self.client.take(0.02)
            outcome.completions += taken.completions
            outcome.moves += taken.moves
            outcome.alarms += taken.alarms
            outcome.lost += taken.lost
            if not struck:
                struck = strike(outcome)
                if struck and then:
                    self.client.enqueue(tuple(then))
            assert struck or len(outcome.completions) < len(requests), "all was over before the blow"
        return outcome

    def kill(self, name: str) -> None:
        """SIGKILL an instance's process."""
        os.kill(self.pids[name], signal.SIGKILL)

    def close(self) -> None:
        for handle in [*self.handles.values(), self.client.handle]:
            ray.kill(handle)


def make_requests(first: int, count: int) -> list[SampleRequest]:
    random = np.random.default_rng(first)
    return [
        SampleRequest(
            key=SampleKey(run_seed=3, stream=Stream.BENCH, sample_index=first + index),
            prompt=Prompt(
                prompt_id=index, token_ids=random.integers(0, tiny_pool.VOCAB_SIZE, 3 + index % 12)
            ),
            sampling=SamplingParams(max_new_tokens=NEW_TOKENS),
        )
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def alone() -> Callable[[Sequence[SampleRequest]], dict[SampleKey, tuple]]:
    """The same samples made in this process, plainly."""
    engine = build_engine(
        tiny_pool.target(),
        None,
        engine=ENGINE,
        speculation=SpeculationConfig(policy="off"),
        max_total_tokens=MAX_TOTAL_TOKENS,
        vocab_size=tiny_pool.VOCAB_SIZE,
    )
    return lambda requests: {c.key: tiny_pool.bits(c) for c in engine.generate(requests)}


def check(outcome: Outcome, expected: dict[SampleKey, tuple]) -> None:
    assert len(outcome.completions) == len({c.key for c in outcome.completions}) == len(expected)
    assert {c.key: tiny_pool.bits(c) for c in outcome.completions} == expected
    assert outcome.alarms == []


@pytest.fixture(scope="module")
def over_gloo(local_ray) -> Iterator[RayPool]:
    pool = RayPool("gloo", 3)
    yield pool
    pool.close()


def moves_of(
    pool: RayPool, alone: Callable[[Sequence[SampleRequest]], dict[SampleKey, tuple]]
) -> list[MoveRecord]:
    """Rollouts, each checked, until ten samples have moved, their caches too: how soon is the machine's."""
    moves: list[MoveRecord] = []
    for first in range(0, 240, 24):
        requests = make_requests(first, 24)
        outcome = pool.run(requests)
        check(outcome, alone(requests))
        moves += outcome.moves
        moved = [record for record in moves if record.outcome == "moved"]
        if len(moved) >= 10 and any(record.metrics.get("stage1_bytes") for record in moved):
            return moves
    raise AssertionError(f"{len(moves)} moves in ten rollouts, of which too few came to their end")


def test_moves_over_the_object_store_change_no_bit(local_ray, alone):
    pool = RayPool("object_store", 2)
    try:
        moves_of(pool, alone)
    finally:
        pool.close()


def test_moves_over_gloo_change_no_bit(over_gloo, alone):
    moves = moves_of(over_gloo, alone)
    assert len({(record.order.source, record.order.destination) for record in moves}) >= 4


def test_a_scheduler_killed_between_moves_is_replaced_and_moves_go_on(over_gloo, alone):
    # the first may be done before the new scheduler has started: it places those of the second lot
    first, second = make_requests(1200, 24), make_requests(1250, 24)

    def strike(outcome: Outcome) -> bool:
        if not outcome.moves:
            return False
        ray.kill(over_gloo.client.handle)
        outcome.moves.clear()
        return True

    outcome = over_gloo.run(first, strike, then=second)
    check(outcome, alone(first + second))
    assert any("takes its place" in line for line in over_gloo.client.updates())
    # samples may end before they leave: the new scheduler gets more of them until some have moved
    moves = outcome.moves + moves_of(over_gloo, alone)
    assert all(record.order.move_id.startswith("1-") for record in moves)


@pytest.mark.parametrize("victim", ["gen-1", "gen-0"])
def test_an_instance_killed_while_samples_leave_it_and_come_to_it(over_gloo, alone, victim):
    """Every running sample is moved again and again: the victim is source and destination when it dies."""
    requests = make_requests(1300 if victim == "gen-1" else 1400, 24)

    def strike(outcome: Outcome) -> bool:
        if outcome.num_moved < 5:
            return False
        over_gloo.kill(victim)
        return True

    outcome = over_gloo.run(requests, strike)
    check(outcome, alone(requests))
    assert [lost.instance for lost in outcome.lost] == [victim]
    assert victim not in ray.get(over_gloo.client.handle.instances.remote(), timeout=60)
    assert any(victim in (r.order.source, r.order.destination) for r in outcome.moves)
