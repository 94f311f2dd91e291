"""Publication: everyone gets the version, the dead are named, a wrong confirmation ends the run. No Ray."""

from collections.abc import Callable
from typing import Any

import pytest

import cluster.weights.publish
from actors.actor_messages import LoadedWeights
from actors.ray_utils.waiting import ActorDied
from cluster.weights.publish import PublishedWeights, from_trainer, publish
from core.errors import WaitTimeout, WeightsError
from core.records import WeightManifest


class Method:
    """Stands for an actor's method: `remote` returns the call itself, which `get` carries out."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self.act = act
        self.num_returns = 1

    def options(self, *, num_returns: int) -> "Method":
        self.num_returns = num_returns
        return self

    def remote(self, *arguments: Any) -> Any:
        if self.num_returns > 1:
            return [f"ref {i}" for i in range(self.num_returns)]
        return lambda: self.act(*arguments)


class Instance:
    def __init__(self, name: str, *, checksum: str = "good", version: int = 3, dies: bool = False) -> None:
        self.name = name
        self.answer = LoadedWeights(instance=name, model="target", weight_version=version, checksum=checksum)
        self.dies = dies
        self.got: list[tuple] = []
        self.load_weights = Method(self.load)

    def load(self, *arguments: Any) -> LoadedWeights:
        self.got.append(arguments)
        if self.dies:
            raise ActorDied(f"{self.name} died")
        return self.answer


def manifest(num_chunks: int = 2) -> WeightManifest:
    return WeightManifest(
        model="target",
        weight_version=3,
        checksum="good",
        num_bytes=0,
        chunk_num_bytes=(1,) * num_chunks,
        chunk_checksums=("c",) * num_chunks,
        tensors=(),
        hf_config_json="{}",
    )


WEIGHTS = PublishedWeights(manifest=manifest(), chunk_refs=("first chunk", "second chunk"))


class Waits:
    """Replaces `get`: carries out the call after `takes_s` seconds of a clock made by hand."""

    def __init__(self, takes_s: float) -> None:
        self.now_s = 100.0
        self.takes_s = takes_s
        self.allowed_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def get(self, ref: Callable[[], Any], *, timeout_s: float, **names: str) -> Any:
        self.allowed_s.append(timeout_s)
        self.now_s += self.takes_s
        return ref()


@pytest.fixture
def waits(monkeypatch) -> Waits:
    waits = Waits(takes_s=2.0)
    monkeypatch.setattr(cluster.weights.publish, "get", waits.get)
    monkeypatch.setattr(cluster.weights.publish, "awake_s", waits.monotonic)
    return waits


def test_every_instance_gets_manifest_and_chunks(waits):
    instances = {name: Instance(name) for name in ("gen-0", "gen-1")}
    assert publish(WEIGHTS, instances, timeout_s=10.0) == {}
    for instance in instances.values():
        assert instance.got == [(10.0, WEIGHTS.manifest, "first chunk", "second chunk")]


def test_instances_share_one_deadline(waits):
    publish(WEIGHTS, {str(i): Instance(str(i)) for i in range(9)}, timeout_s=10.0)
    # five seconds of grace over the 10, two seconds a wait, and never less than none
    assert waits.allowed_s == [15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0, 0.0]


def test_a_dead_instance_is_named_and_the_others_are_still_confirmed(waits):
    instances = {"gen-0": Instance("gen-0", dies=True), "gen-1": Instance("gen-1")}
    lost = publish(WEIGHTS, instances, timeout_s=10.0)
    assert list(lost) == ["gen-0"] and str(lost["gen-0"]) == "gen-0 died"
    wrong = {"gen-0": Instance("gen-0", dies=True), "gen-1": Instance("gen-1", checksum="bad")}
    with pytest.raises(WeightsError, match="gen-1 confirmed target version 3 with checksum bad"):
        publish(WEIGHTS, wrong, timeout_s=10.0)


def test_an_older_version_is_no_confirmation_though_its_checksum_is_equal(waits):
    with pytest.raises(WeightsError, match="expected version 3"):
        publish(WEIGHTS, {"gen-0": Instance("gen-0", version=2)}, timeout_s=10.0)


class FakeTrainer:
    def __init__(self, num_chunks: int) -> None:
        self.pack = Method(lambda model: manifest(num_chunks))
        self.chunks = Method(lambda: None)


@pytest.fixture
def num_ready(monkeypatch) -> Callable[[int], None]:
    """Let so many of the trainer's chunks become ready."""

    def make(number: int) -> None:
        monkeypatch.setattr(
            cluster.weights.publish.ray, "wait", lambda refs, **settings: (refs[:number], refs[number:])
        )

    return make


def test_the_trainer_s_chunks_are_as_many_as_its_manifest_says(waits, num_ready):
    num_ready(3)
    taken = from_trainer(FakeTrainer(3), timeout_s=10.0)
    assert taken.manifest.weight_version == 3 and taken.chunk_refs == ("ref 0", "ref 1", "ref 2")


def test_one_chunk_is_one_reference(waits, num_ready):
    num_ready(1)
    trainer = FakeTrainer(1)
    (ref,) = from_trainer(trainer, timeout_s=10.0).chunk_refs
    assert callable(ref), "the reference itself, not its characters or members"


def test_chunks_that_do_not_come_end_the_wait(waits, num_ready):
    num_ready(2)
    with pytest.raises(WaitTimeout, match="the loop waited 10 s for trainer to answer 'hand out 3 weight"):
        from_trainer(FakeTrainer(3), timeout_s=10.0)
