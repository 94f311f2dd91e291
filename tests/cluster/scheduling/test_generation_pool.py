"""The generation pool tells of every instance that is lost and replaced, in or outside of a rollout. No Ray."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import cluster.scheduling.generation_pool
from actors.actor_messages import InstanceNumerics, LostInstance
from actors.ray_utils.waiting import ActorDied
from cluster.scheduling.generation_pool import GenerationPool
from cluster.scheduling.instance_table import InstanceTable
from core.config import ClusterConfig
from core.errors import InstanceLost


class Method:
    def remote(self, *arguments: Any) -> object:
        return object()


class Scheduler:
    def __init__(self) -> None:
        self.joined: list[str] = []
        self.lost: list[str] = []

    def join(self, name: str) -> None:
        self.joined.append(name)

    def lose(self, name: str, reason: str) -> None:
        self.lost.append(name)


class World:
    """Instances that confirm every version, but for those that are dead."""

    def __init__(self, monkeypatch) -> None:
        self.dead: set[str] = set()
        self.notes: list[str] = []
        self.scheduler = Scheduler()
        actor = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self.make))
        monkeypatch.setattr(cluster.scheduling.generation_pool, "GenerationActor", actor)
        monkeypatch.setattr(cluster.scheduling.generation_pool, "actor_options", lambda place, context: {})
        monkeypatch.setattr(cluster.scheduling.generation_pool, "publish", self.publish)
        self.numerics = InstanceNumerics(promise="invariant: every bit", rounds_by="code of our own (cpu)")
        monkeypatch.setattr(cluster.scheduling.generation_pool, "get", lambda ref, **wait: self.numerics)
        monkeypatch.setattr(cluster.scheduling.generation_pool.ray, "kill", lambda handle: None)
        self.pool = GenerationPool(
            cluster=ClusterConfig(max_instance_restarts=2),
            topology=SimpleNamespace(generation=tuple(SimpleNamespace(name=f"gen-{i}") for i in range(2))),
            context=SimpleNamespace(group=None),
            single_places=SimpleNamespace(),
            scheduler=self.scheduler,
            instances=InstanceTable(),
            spec_for=lambda name: SimpleNamespace(
                model_names=("target",), engine=SimpleNamespace(max_running_samples=4)
            ),
            note=self.notes.append,
        )
        self.weights = SimpleNamespace(manifest=SimpleNamespace(model="target"))
        self.pool.make_all()
        self.pool.bring_up(self.weights)

    def make(self, spec: Any) -> Any:
        return SimpleNamespace(run=Method(), numerics=Method(), node=Method())

    def publish(self, weights: Any, handles: dict, *, timeout_s: float) -> dict[str, InstanceLost]:
        return {name: ActorDied(f"{name} died: SIGKILL") for name in handles if name in self.dead}


@pytest.fixture
def world(monkeypatch) -> World:
    return World(monkeypatch)


def test_an_instance_that_died_between_rollouts_is_reported_and_replaced_at_the_publication(world):
    world.dead = {"gen-0"}
    world.pool.publish(world.weights)
    assert world.notes == ["instance gen-0 was lost (gen-0 died: SIGKILL); gen-0-r1 takes its place"]
    assert sorted(world.pool.instances) == ["gen-0-r1", "gen-1"] and world.scheduler.lost == ["gen-0"]
    assert world.scheduler.joined == ["gen-0", "gen-1", "gen-0-r1"]


def test_numerics_that_promise_less_than_bits_are_reported_once(world):
    assert world.pool.is_invariant
    world.numerics = replace(world.numerics, promise="fast: the distribution (engine.num_threads is 2)")
    for name in ("gen-0", "gen-1"):
        world.pool.replace(LostInstance(instance=name, reason="silent", num_requeued=0))
    assert not world.pool.is_invariant
    told = [note for note in world.notes if "numerics" in note]
    assert told == ["numerics on gen-0-r1: fast: the distribution (engine.num_threads is 2)"]


def test_an_instance_that_rounds_by_other_code_is_named_and_bits_are_promised_no_more(world):
    world.numerics = replace(world.numerics, rounds_by="torch 2.13.0 on a processor")
    world.pool.replace(LostInstance(instance="gen-1", reason="silent", num_requeued=0))
    assert not world.pool.is_invariant
    (told,) = [note for note in world.notes if "numerics" in note]
    assert told.startswith(
        "numerics on gen-1-r1: it rounds by torch 2.13.0 on a processor, the first instance by "
    )


def test_a_replacement_is_reported_once_with_the_number_of_requeued_samples(world):
    lost = LostInstance(instance="gen-1", reason="silent for 61 s", num_requeued=3)
    assert world.pool.replace(lost) == "gen-1-r1" and world.pool.replace(lost) is None
    assert world.notes == [
        "instance gen-1 was lost (silent for 61 s); 3 samples were queued again, gen-1-r1 takes its place"
    ]


def test_a_replacement_that_dies_is_replaced_until_the_restarts_are_used_up(world):
    world.dead = {"gen-0-r1", "gen-0-r2"}
    with pytest.raises(InstanceLost, match="all 2 replacements of this run are used up") as caught:
        world.pool.replace(LostInstance(instance="gen-0", reason="died", num_requeued=0))
    assert len(world.notes) == 2 and "memory" not in str(caught.value)
