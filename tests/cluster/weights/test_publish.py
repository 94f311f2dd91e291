"""Publication: everyone gets the version, the dead are named, a wrong confirmation ends the run. Real Ray, no torch."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray

import rlhfspec.cluster.weights.publish
from rlhfspec.actors.actor_messages import LoadedWeights
from rlhfspec.cluster.weights.publish import Fetching, PublishedWeights, publish
from rlhfspec.core.errors import WaitTimeout, WeightsError
from rlhfspec.core.weight_records import WeightManifest

pytestmark = pytest.mark.ray

TIMEOUT_S = 60.0
CHUNKS = (np.arange(3), np.arange(5))


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


@ray.remote(num_cpus=0, max_restarts=0)
class Instance:
    """Confirms what it was told to confirm."""

    def __init__(self, name: str, version: int = 3, checksum: str = "good") -> None:
        self.answer = LoadedWeights(instance=name, model="target", weight_version=version, checksum=checksum)
        self.got: list[tuple] = []

    def load_weights(self, timeout_s: float, told: WeightManifest, *chunks: np.ndarray) -> LoadedWeights:
        self.got.append((timeout_s, told, [chunk.tolist() for chunk in chunks]))
        return self.answer

    def take(self) -> list[tuple]:
        return self.got


@ray.remote(num_cpus=0, max_restarts=0)
class Trainer:
    """Hands out so many chunks, or hangs instead."""

    def __init__(self, num_chunks: int, hangs: bool = False) -> None:
        self.num_chunks = num_chunks
        self.hangs = hangs

    def packed(self, model: str, checksums: str | None) -> Iterator[Any]:
        room = np.zeros(4, np.int64)
        for i in range(self.num_chunks):
            # as the trainer does: each chunk is written over the one before
            room[:] = i
            yield room
            while self.hangs:
                time.sleep(1.0)
        yield manifest(self.num_chunks)


@pytest.fixture
def weights(local_ray) -> PublishedWeights:
    return PublishedWeights(manifest=manifest(), chunk_refs=tuple(ray.put(chunk) for chunk in CHUNKS))


@pytest.fixture
def start(local_ray) -> Iterator[Callable]:
    """Start an actor that ends with the test."""
    made = []

    def make(kind: Any, *arguments: Any, **options: Any) -> Any:
        made.append(kind.remote(*arguments, **options))
        return made[-1]

    yield make
    for actor in made:
        ray.kill(actor)


def test_every_instance_gets_manifest_and_chunks(start, weights):
    instances = {name: start(Instance, name) for name in ("gen-0", "gen-1")}
    assert publish(weights, instances, timeout_s=TIMEOUT_S) == {}
    for instance in instances.values():
        got = ray.get(instance.take.remote(), timeout=TIMEOUT_S)
        assert got == [(TIMEOUT_S, weights.manifest, [chunk.tolist() for chunk in CHUNKS])]


def test_a_dead_instance_is_named_and_the_others_are_still_confirmed(start, weights):
    instances = {"gen-0": start(Instance, "gen-0"), "gen-1": start(Instance, "gen-1")}
    ray.kill(instances["gen-0"])
    lost = publish(weights, instances, timeout_s=TIMEOUT_S)
    assert list(lost) == ["gen-0"] and "gen-0 died while the loop waited" in str(lost["gen-0"])
    instances["gen-1"] = start(Instance, "gen-1", checksum="bad")
    with pytest.raises(WeightsError, match="gen-1 confirmed target version 3 with checksum bad"):
        publish(weights, instances, timeout_s=TIMEOUT_S)


def test_an_older_version_is_no_confirmation_though_its_checksum_is_equal(start, weights):
    with pytest.raises(WeightsError, match="expected version 3"):
        publish(weights, {"gen-0": start(Instance, "gen-0", version=2)}, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_the_trainers_chunks_are_as_many_as_its_manifest_says(start, num_chunks):
    taken = Fetching(start(Trainer, num_chunks), timeout_s=TIMEOUT_S).wait()
    assert taken.manifest.weight_version == 3
    fetched = ray.get(list(taken.chunk_refs), timeout=TIMEOUT_S)
    assert [chunk.tolist() for chunk in fetched] == [[i] * 4 for i in range(num_chunks)]


def test_chunks_that_do_not_come_end_the_wait(start):
    trainer = start(Trainer, 3, hangs=True)
    ray.get(trainer.__ray_ready__.remote(), timeout=TIMEOUT_S)
    with pytest.raises(WaitTimeout, match=r"the loop waited 5 s for trainer to answer 'pack .* \(chunk 1\)"):
        Fetching(trainer, timeout_s=5.0).wait()


def test_instances_share_one_deadline(start, weights, monkeypatch):
    """By a clock made by hand: every answer takes two seconds of it."""
    now_s, allowed_s = [100.0], []

    def answer(ref: Any, *, timeout_s: float, **names: str) -> Any:
        allowed_s.append(timeout_s)
        now_s[0] += 2.0
        return ray.get(ref, timeout=TIMEOUT_S)

    monkeypatch.setattr(rlhfspec.cluster.weights.publish, "get", answer)
    monkeypatch.setattr(rlhfspec.cluster.weights.publish, "awake_s", lambda: now_s[0])
    instance = start(Instance, "gen-0")
    publish(weights, {f"gen-{i}": instance for i in range(9)}, timeout_s=10.0)
    # five seconds of grace over the 10, two seconds a wait, and never less than none
    assert allowed_s == [15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0, 0.0]
