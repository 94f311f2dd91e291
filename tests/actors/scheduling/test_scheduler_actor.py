"""The scheduler actor over fake instances: kills, freezes and errors. Real Ray, no torch."""

import contextlib
import os
import signal
import time

import pytest
import ray
from fake_engine import POISON, FakeInstance, make_request, response_of

from rlhfspec.actors.actor_messages import SchedulerSettings
from rlhfspec.actors.remote.waiting import get
from rlhfspec.actors.scheduling.scheduler_actor import SchedulerActor
from rlhfspec.core.errors import DataError

pytestmark = pytest.mark.ray


class Cluster:
    """A scheduler and its fake instances; everything ends with the test."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        settings = SchedulerSettings(
            poll_interval_s=0.05,
            heartbeat_timeout_s=heartbeat_timeout_s,
            order_timeout_s=60.0,
            reallocation_interval_s=0.1,
        )
        self.scheduler = SchedulerActor.options(num_cpus=0).remote(settings)
        self.sentinel = self.scheduler.run.remote()
        self.instances = {}

    def join(self, name: str, *, slots: int, step_s: float = 0.0, poisoned: bool = False) -> int:
        handle = FakeInstance.options(num_cpus=0).remote(name, step_s, poisoned)
        self.instances[name] = handle
        pid = ray.get(handle.pid.remote(), timeout=60)
        ray.get(self.scheduler.join.remote(name, handle, slots), timeout=60)
        return pid

    def enqueue(self, *requests) -> None:
        ray.get(self.scheduler.enqueue.remote(requests), timeout=60)

    def take(self):
        return get(
            self.scheduler.take.remote(0.2), waiter="test", waited_for="scheduler", order="take", timeout_s=60
        )

    def take_until(self, count: int, deadline_s: float = 300.0):
        completions, lost = [], []
        ends = time.monotonic() + deadline_s
        while len(completions) < count:
            assert time.monotonic() < ends, f"{len(completions)} of {count} completions after {deadline_s} s"
            taken = self.take()
            completions += taken.completions
            lost += taken.lost
        return completions, lost


@pytest.fixture
def cluster(local_ray):
    made = []

    def make(heartbeat_timeout_s: float = 30.0) -> Cluster:
        made.append(Cluster(heartbeat_timeout_s))
        return made[-1]

    yield make
    for item in made:
        for handle in [item.scheduler, *item.instances.values()]:
            ray.kill(handle)


def tokens_of(completions) -> dict[int, list[int]]:
    assert len({c.key for c in completions}) == len(completions)
    return {c.key.sample_index: c.token_ids.tolist() for c in completions}


def expected(count: int) -> dict[int, list[int]]:
    return {i: response_of(i).tolist() for i in range(count)}


def test_a_killed_instance_loses_no_sample_and_its_slots_go_to_the_other(cluster):
    running = cluster()
    pid = running.join("gen-0", slots=3, step_s=0.02)
    running.join("gen-1", slots=3, step_s=0.02)
    running.enqueue(*[make_request(i) for i in range(40)])
    first, _ = running.take_until(5)
    os.kill(pid, signal.SIGKILL)
    # several may have come together
    rest, lost = running.take_until(40 - len(first))
    assert tokens_of(first + rest) == expected(40)
    assert [item.instance for item in lost] == ["gen-0"]
    assert {c.instance for c in first + rest} == {"gen-0", "gen-1"}
    assert max(c.epoch for c in rest) == 1


def test_an_instance_that_says_why_it_ends_is_lost_in_these_words(cluster):
    running = cluster()
    running.join("gen-0", slots=3, step_s=0.02)
    running.join("gen-1", slots=3, step_s=0.02)
    running.enqueue(*[make_request(i) for i in range(40)])
    first, _ = running.take_until(5)
    ray.get(running.instances["gen-0"].lose.remote("rank 1 of 2 has ended"), timeout=60)
    rest, lost = running.take_until(40 - len(first))
    assert tokens_of(first + rest) == expected(40)
    assert [(item.instance, item.reason) for item in lost] == [("gen-0", "rank 1 of 2 has ended")]


def test_a_frozen_instance_is_given_up_and_never_holds_up_the_others(cluster):
    running = cluster(heartbeat_timeout_s=4.0)
    pid = running.join("frozen", slots=2, step_s=0.02)
    running.join("alive", slots=2, step_s=0.02)
    os.kill(pid, signal.SIGSTOP)
    try:
        running.enqueue(*[make_request(i) for i in range(12)])
        early, lost = running.take_until(5)
        assert lost == [] and {c.instance for c in early} == {"alive"}
        late, lost = running.take_until(12 - len(early))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert tokens_of(early + late) == expected(12)
    assert "silent for" in lost[0].reason and lost[0].num_requeued == 2


def test_a_failing_decode_step_surfaces_where_completions_are_taken(cluster):
    running = cluster()
    running.join("gen-0", slots=20, poisoned=True)
    running.enqueue(*[make_request(i) for i in range(POISON, POISON + 1)])
    with pytest.raises(ZeroDivisionError, match="planted"):
        running.take_until(1)


def test_an_error_of_ours_inside_an_instance_surfaces_as_itself(cluster):
    running = cluster()
    running.join("gen-0", slots=2)
    running.enqueue(make_request(0, prompt_tokens=101))
    with pytest.raises(DataError) as caught:
        running.take_until(1)
    assert type(caught.value) is DataError
    assert str(caught.value) == "prompt 0 does not fit the context"


def test_a_scheduler_that_was_frozen_gives_nobody_up_and_changes_no_token(cluster):
    running = cluster(heartbeat_timeout_s=2.0)
    for name in ("gen-0", "gen-1"):
        running.join(name, slots=2, step_s=0.1)
    call = running.scheduler.__ray_call__.options(concurrency_group="control")
    pid = ray.get(call.remote(lambda actor: os.getpid()), timeout=60)
    running.enqueue(*[make_request(i) for i in range(40)])
    first, lost_first = running.take_until(4)
    os.kill(pid, signal.SIGSTOP)
    try:
        # longer than the heartbeat timeout, in which both instances finish what they have
        time.sleep(5.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    rest, lost = running.take_until(40 - len(first))
    assert tokens_of(first + rest) == expected(40)
    assert lost_first + lost == [] and {c.epoch for c in rest} == {0}
    assert sorted(ray.get(running.scheduler.instances.remote(), timeout=60)) == ["gen-0", "gen-1"]
