"""Weights that were broadcast come into the object store beside the run, when somebody joins. No Ray."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from scripted_pool import ScriptedPool, weights

import rlhfspec.cluster.weights.publish as publishing
from rlhfspec.actors.actor_messages import Taken
from rlhfspec.cluster.weights.publish import Fetching, PublishedWeights
from rlhfspec.core.errors import InstanceLost, WaitTimeout, WeightsError


class Coming:
    """Weights on their way that are there when the test says so."""

    def __init__(self, brings: PublishedWeights | Exception) -> None:
        self.brings, self.num_orders, self.is_there = brings, 0, False

    def order(self) -> Any:
        self.num_orders += 1
        return self

    def look(self) -> PublishedWeights | None:
        if isinstance(self.brings, Exception):
            raise self.brings
        return self.brings if self.is_there else None

    def wait(self) -> PublishedWeights | None:
        self.is_there = True
        return self.look()


def broadcast(version: int, brings: PublishedWeights | Exception) -> tuple[PublishedWeights, Coming]:
    coming = Coming(brings)
    return weights(version, fetch=coming.order), coming


def chunked(version: int) -> PublishedWeights:
    return replace(weights(version), chunk_refs=("a", "b"))


def test_chunks_are_ordered_once_and_nobody_waits_for_them():
    found, coming = broadcast(3, chunked(3))
    assert found.refs_so_far(may_ask=False) is None and coming.num_orders == 0
    assert found.refs_so_far(may_ask=True) is None
    # what is on its way is looked at while the trainer must not be asked
    assert found.refs_so_far(may_ask=False) is None and coming.num_orders == 1
    coming.is_there = True
    assert found.refs_so_far(may_ask=False) == ("a", "b") and found.refs() == ("a", "b")
    assert coming.num_orders == 1 and found.fetch is None


def test_a_checkpoint_waits_for_what_a_joiner_has_ordered():
    found, coming = broadcast(3, chunked(3))
    found.refs_so_far(may_ask=True)
    assert found.refs() == ("a", "b") and coming.num_orders == 1


def test_a_trainer_that_has_trained_on_brings_nothing_and_is_no_fault_to_a_joiner():
    found, coming = broadcast(3, chunked(4))
    coming.is_there = True
    assert found.refs_so_far(may_ask=True) is None
    with pytest.raises(WeightsError, match="it has trained on"):
        found.refs()


def test_other_weights_under_the_same_version_are_an_error():
    other = chunked(3)
    found, coming = broadcast(3, replace(other, manifest=replace(other.manifest, checksum="other")))
    coming.is_there = True
    with pytest.raises(WeightsError, match="with checksum sum 3, got version 3 with other"):
        found.refs_so_far(may_ask=True)


def test_a_trainer_that_dies_is_told_and_asked_anew():
    found, coming = broadcast(3, InstanceLost("trainer died"))
    with pytest.raises(InstanceLost, match="trainer died"):
        found.refs_so_far(may_ask=True)
    coming.brings, coming.is_there = chunked(3), True
    assert found.refs_so_far(may_ask=True) == ("a", "b") and coming.num_orders == 2


def test_an_instance_that_joins_after_a_broadcast_gets_its_weights_without_a_pause_of_the_others(
    monkeypatch,
):
    world = ScriptedPool(monkeypatch)
    found, coming = broadcast(1, chunked(1))
    world.pool.keep(found)
    for name in ("gen-0", "gen-1"):
        world.lose(name)
    world.look()
    assert coming.num_orders == 1 and not world.serving and not world.actors["gen-0-r1"].loaded
    coming.is_there = True
    world.look()
    assert world.serving == ["gen-0-r1", "gen-1-r2"] and world.actors["gen-1-r2"].loaded == [1]


def test_who_joins_while_trainers_learn_waits_for_the_next_version_however_long_that_takes(monkeypatch):
    world = ScriptedPool(monkeypatch)
    (found := chunked(1)).drop_chunks(lambda: pytest.fail("the trainer is busy"))
    world.pool.keep(found)
    for name in ("gen-0", "gen-1"):
        world.lose(name)
    for _ in range(100):
        world.now_s += 20.0
        world.pool.look(Taken(), may_fetch=False)
    assert not world.said("could not start") and not world.actors["gen-0-r1"].loaded
    world.pool.keep(weights(2))
    world.look()
    assert world.serving == ["gen-0-r1", "gen-1-r2"] and world.actors["gen-1-r2"].loaded == [2]


def test_a_trainer_that_dies_while_it_is_asked_is_no_fault_of_who_joins(monkeypatch):
    world = ScriptedPool(monkeypatch)
    world.pool.keep(broadcast(1, InstanceLost("trainer died"))[0])
    world.lose("gen-0")
    with pytest.raises(InstanceLost, match="trainer died"):
        world.look()
    assert not world.said("could not start")


class Played:
    """A trainer that hands out chunks as the test says, and clocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *items: Any) -> None:
        self.items, self.num_there, self.now_s = list(items), 0, 0.0
        self.helpers_there = False
        self.packed = SimpleNamespace(
            options=lambda num_returns: SimpleNamespace(remote=lambda model, checksums: self)
        )
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr(publishing, "awake_s", lambda: self.now_s)
        monkeypatch.setattr(publishing, "get", lambda ref, **why: ref)
        monkeypatch.setattr(publishing, "get_all", lambda refs, **why: self.asked.append(dict(refs)))
        self.asked: list[dict[str, Any]] = []

    def wait(self, refs: list[Any], *, timeout: float, **how: Any) -> tuple[list[Any], list[Any]]:
        if refs != [self]:
            return (refs, []) if self.helpers_there else ([], refs)
        if self.num_there == 0:
            self.now_s += timeout
        return (refs, []) if self.num_there else ([], refs)

    def __next__(self) -> Any:
        self.num_there -= 1
        if not self.items:
            raise StopIteration
        return self.items.pop(0)


def test_a_look_takes_the_chunks_that_are_there(monkeypatch):
    trainer = Played(monkeypatch, "a", "b", "the manifest")
    coming = Fetching(trainer, timeout_s=30.0)  # type: ignore[arg-type]
    assert coming.look() is None
    trainer.num_there = 2
    assert coming.look() is None
    trainer.num_there = 2
    found = coming.look()
    assert found is not None and (found.manifest, found.chunk_refs) == ("the manifest", ("a", "b"))


def test_weights_are_whole_when_the_trainers_that_help_are_done(monkeypatch):
    trainer = Played(monkeypatch, "a", "the manifest")
    trainer.num_there = 3
    coming = Fetching(trainer, timeout_s=30.0, helpers={"trainer-1": "done"})  # type: ignore[arg-type]
    assert coming.look() is None
    trainer.helpers_there = True
    assert coming.look() is not None and trainer.asked == [{"trainer-1": "done"}]


def test_a_trainer_that_is_silent_is_named(monkeypatch):
    trainer = Played(monkeypatch, "a", "the manifest")
    coming = Fetching(trainer, timeout_s=30.0)  # type: ignore[arg-type]
    trainer.num_there, trainer.now_s = 1, 29.0
    assert coming.look() is None
    trainer.now_s = 31.0
    with pytest.raises(WaitTimeout, match=r"for trainer to answer 'pack the target weights \(chunk 1\)'"):
        coming.look()


def test_the_loop_looks_after_other_things_every_second_while_it_waits(monkeypatch):
    trainer, seen = Played(monkeypatch, "a", "the manifest"), []

    def meanwhile() -> None:
        seen.append(trainer.now_s)
        trainer.num_there = 3 if len(seen) == 3 else 0

    found = Fetching(trainer, timeout_s=30.0).wait(meanwhile)  # type: ignore[arg-type]
    assert found.chunk_refs == ("a",) and seen == [1.0, 2.0, 3.0]
    trainer.num_there = 0
    with pytest.raises(WaitTimeout):
        Fetching(trainer, timeout_s=5.0).wait(lambda: None)  # type: ignore[arg-type]
    assert trainer.now_s == 8.0
