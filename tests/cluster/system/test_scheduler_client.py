"""The scheduler's death over fake instances: nothing lost, nothing twice, a bound. Real Ray, no torch."""

import os
import queue
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import ray
from fake_engine import FakeInstance, make_request, response_of
from ray._private.state import actors

from rlhfspec.actors.actor_messages import SchedulerSettings
from rlhfspec.actors.remote.waiting import ActorDied, get
from rlhfspec.actors.scheduling.scheduler_actor import SchedulerActor
from rlhfspec.cluster.system.instance_table import Instance, InstanceTable
from rlhfspec.cluster.system.scheduler_client import SchedulerClient
from rlhfspec.core.errors import SchedulerLost
from rlhfspec.core.records import Completion

pytestmark = pytest.mark.ray

MAX_RESTARTS = 2


@dataclass
class Pool:
    client: SchedulerClient
    table: InstanceTable
    instances: dict = field(default_factory=dict)
    done: dict[int, Completion] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    updates: list[str] = field(default_factory=list)
    planned_s: list[float] = field(default_factory=list)

    def join(self, name: str, *, step_s: float) -> None:
        self.instances[name] = FakeInstance.options(num_cpus=0).remote(name, step_s)
        self.table[name] = Instance(handle=self.instances[name], num_slots=3)
        self.client.join(name)

    def ask(self, *indices: int) -> None:
        self.client.enqueue(tuple(make_request(i) for i in indices))

    def take_until(self, count: int, deadline_s: float = 300.0) -> None:
        ends = time.monotonic() + deadline_s
        while len(self.done) < count:
            assert time.monotonic() < ends, f"{len(self.done)} of {count} completions"
            taken = self.client.take(0.2)
            assert taken.alarms == ()
            for completion in taken.completions:
                index = completion.key.sample_index
                assert index not in self.done, "delivered twice"
                assert completion.token_ids.tolist() == response_of(index).tolist()
                self.done[index] = completion
            self.lost += [lost.instance for lost in taken.lost]
            self.updates += self.client.updates()
            self.planned_s.append(self.client.planning_s)


@pytest.fixture
def pool(local_ray) -> Iterator[Pool]:
    made = []

    def make(settings: SchedulerSettings):
        made.append(SchedulerActor.options(num_cpus=0).remote(settings))
        return made[-1]

    settings = SchedulerSettings(
        poll_interval_s=0.05, heartbeat_timeout_s=30.0, order_timeout_s=60.0, reallocation_interval_s=0.1
    )
    table = InstanceTable()
    pool = Pool(
        SchedulerClient(make, settings, table, max_restarts=MAX_RESTARTS, start_timeout_s=60.0), table
    )
    yield pool
    for handle in (*made, *pool.instances.values()):
        ray.kill(handle)


def test_every_sample_comes_once_though_the_scheduler_dies_and_dies_again_until_no_restart_is_left(pool):
    pool.join("gen-0", step_s=0.02)
    pool.join("gen-1", step_s=0.02)
    pool.ask(*range(60))
    for so_far in (10, 30):
        pool.take_until(so_far)
        ray.kill(pool.client.handle)
    pool.take_until(60)
    assert len(pool.updates) == MAX_RESTARTS and "scheduler-r2 takes its place: of" in pool.updates[-1]
    assert pool.lost == [] and {c.instance for c in pool.done.values()} == {"gen-0", "gen-1"}
    assert pool.client.stats.num_emitted_tokens >= sum(len(response_of(i)) for i in range(60))
    assert pool.planned_s[-1] > 0.0 and pool.planned_s == sorted(pool.planned_s), "dead schedulers' included"

    pool.ask(60, 61)
    pool.take_until(62)
    ray.kill(pool.client.handle)
    with pytest.raises(SchedulerLost, match=f"all {MAX_RESTARTS} restarts .*max_scheduler_restarts"):
        pool.take_until(63)


def test_an_instance_that_died_with_the_scheduler_is_reported_and_its_samples_go_to_the_other(pool):
    pool.join("gen-0", step_s=0.05)
    pool.join("gen-1", step_s=0.05)
    pool.ask(*range(20))
    pool.take_until(3)
    # In this order the scheduler cannot have told the loop of the instance's death.
    ray.kill(pool.client.handle)
    ray.kill(pool.instances["gen-0"])
    pool.take_until(20)
    assert pool.lost == ["gen-0"]
    assert list(ray.get(pool.client.handle.instances.remote(), timeout=60)) == ["gen-1"]
    assert {c.epoch for c in pool.done.values()} == {0, 1}


def test_a_take_on_its_way_keeps_no_order_waiting_and_that_of_a_dead_scheduler_is_made_anew(pool):
    answered = queue.SimpleQueue[None]()
    pool.join("gen-0", step_s=0.0)
    pool.client.ask_ahead(600.0, lambda: answered.put(None))
    assert not pool.client.has_answered(late_s=600.0)
    assert pool.client.has_answered(late_s=0.0), "whoever is late is waited for, and replaced in the end"
    pool.ask(0)
    answered.get(timeout=300.0)
    assert pool.client.has_answered(late_s=600.0)
    pool.take_until(1)
    pool.client.ask_ahead(600.0, lambda: answered.put(None))
    ray.kill(pool.client.handle)
    answered.get(timeout=300.0)
    pool.ask(1)
    assert not pool.client.has_answered(late_s=0.0), "an order has put another scheduler in its place"
    pool.take_until(2)
    assert len(pool.updates) == 1


def test_a_call_to_a_dead_or_frozen_scheduler_is_carried_out_by_its_successor(pool):
    ray.kill(pool.client.handle)
    pool.join("gen-0", step_s=0.0)
    os.kill(actors(pool.client.handle._actor_id.hex())["Pid"], signal.SIGSTOP)
    pool.ask(4, 5)
    pool.take_until(2)
    assert sorted(pool.done) == [4, 5] and len(pool.client.updates() + pool.updates) == 2


def test_a_call_to_a_dead_actor_raises_actor_died(pool):
    names = {"waiter": "test", "waited_for": "scheduler", "timeout_s": 60.0}
    ray.kill(pool.client.handle)
    with pytest.raises(ActorDied, match="scheduler died while test waited for 'instances'"):
        get(pool.client.handle.instances.remote(), order="instances", **names)
