"""The scheduler fails when its instances make no token for too long, and gathers completions for the loop. No Ray."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine, make_request

import rlhfspec.actors.scheduling.scheduler_actor
from rlhfspec.actors.actor_messages import SchedulerSettings
from rlhfspec.core.errors import WaitTimeout
from rlhfspec.policies.scheduling.events import ClockTicked, InstanceGone, InstanceReported


class Silent:
    """An instance that takes everything and says nothing."""

    def __getattr__(self, order: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: object())


class Played:
    """A scheduler without a process of its own, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.now_s = 0.0
        module = rlhfspec.actors.scheduling.scheduler_actor
        monkeypatch.setattr(module, "begin_actor", lambda name: name)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        given = SchedulerSettings(
            poll_interval_s=0.1,
            heartbeat_timeout_s=1000.0,
            order_timeout_s=10.0,
            reallocation_interval_s=1.0,
            **settings,
        )
        self.actor = module.SchedulerActor.__ray_metadata__.modified_class(given)  # type: ignore[attr-defined]

    def pass_by(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            self.actor._handle(ClockTicked(now_s=self.now_s))
            self.actor._check_for_stall()
        self.actor.take(0.0)


def test_samples_without_an_instance_wait_and_those_of_a_silent_one_are_a_failure(monkeypatch):
    played = Played(monkeypatch)
    played.actor.enqueue((make_request(0), make_request(1)))
    # the loop has a limit of its own for that
    played.pass_by(60)
    played.actor.join("gen-0", Silent(), 4)
    played.pass_by(9)
    with pytest.raises(WaitTimeout, match=r"the scheduler \(2 open samples\) waited \d+ s for gen-0"):
        played.pass_by(3)


def test_completions_are_gathered_until_none_is_awaited_or_an_instance_is_lost(monkeypatch):
    played, requests = Played(monkeypatch), [make_request(index) for index in range(3)]
    made = [FakeEngine("gen-0").completion(request) for request in requests]

    def ends(number: int) -> None:
        played.actor._handle(InstanceReported(instance="gen-0", now_s=0.0, completions=(made[number],)))

    monkeypatch.setattr("ray.kill", lambda handle: None)
    played.actor.join("gen-0", Silent(), 4)
    with ThreadPoolExecutor() as threads:
        played.actor.enqueue(tuple(requests[:2]))
        both = threads.submit(played.actor.take, 60.0, True)
        ends(0), ends(1)
        assert len(both.result(timeout=30.0).completions) == 2
        played.actor.enqueue((requests[2], make_request(3)))
        one = threads.submit(played.actor.take, 60.0, True)
        ends(2)
        played.actor._handle(InstanceGone(instance="gen-0", reason="killed"))
        taken = one.result(timeout=30.0)
        assert len(taken.completions) == 1 and [lost.instance for lost in taken.lost] == ["gen-0"]


def test_who_gives_up_a_lost_instance_hears_why_it_was_lost_first(monkeypatch):
    played = Played(monkeypatch)
    monkeypatch.setattr("ray.kill", lambda handle: None)
    for name in ("gen-0", "gen-1"):
        played.actor.join(name, Silent(), 4)
    played.actor._handle(InstanceGone(instance="gen-0", reason="died: its process vanished without a word"))
    # a call that comes after the scheduler has ended what was left of it
    assert (
        played.actor.lose("gen-0", "it was ended by ray.kill") == "died: its process vanished without a word"
    )
    assert played.actor.lose("gen-1", "its load failed") == "its load failed"
    assert [lost.instance for lost in played.actor.take(0.0).lost] == ["gen-0", "gen-1"]


class Polled(Silent):
    """One that keeps for how long its polls may wait."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.poll = SimpleNamespace(remote=lambda acknowledged, wait_s: self.waits.append(wait_s) or object())


@pytest.mark.parametrize(
    ("policy", "num_instances", "wait_s"), [(None, 2, 1.0), (object(), 1, 1.0), (object(), 2, 0.1)]
)
def test_polls_are_frequent_only_where_samples_can_move(monkeypatch, policy, num_instances, wait_s):
    played, instances = Played(monkeypatch, reallocation=policy), [Polled() for _ in range(num_instances)]
    for number, instance in enumerate(instances):
        played.actor.join(f"gen-{number}", instance, 1)
    played.actor.enqueue(tuple(make_request(index) for index in range(num_instances)))
    refs = played.actor._refs_in_flight()
    assert played.actor._refs_in_flight() == refs, "a poll is in flight to each"
    assert [instance.waits for instance in instances] == [[wait_s]] * num_instances
