"""Several trainers bring new weights to the instances on their own GPUs: nothing but headers passes through the host.

Trainers and instances are real and share this process, each with a thread of its own as an actor has; on which GPU each
sits is made up, and windows are memory of the host (`tests.helpers.windows`).
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfspec.cluster.system import weight_broadcast
from rlhfspec.cluster.system.trainer_pool import TrainerPool
from rlhfspec.cluster.system.weight_broadcast import Broadcast
from rlhfspec.cluster.weights.publish import PublishedWeights
from rlhfspec.core.config import ClusterConfig
from rlhfspec.core.weight_records import WORDS
from rlhfspec.engine.weights.chunks import CHUNK_BYTES, model_checksum, pack_weights, unique_tensors
from tests.helpers import tiny_pool
from tests.helpers.served_beside import (
    Instance,
    OnTheHost,
    TrainerHere,
    in_one_process,
    learn,
    serve_from_a_shard,
    trainer_of,
)
from tests.helpers.trainer_group import run_group


class Sitting:
    """An actor's object on a made-up GPU; orders run one after the other in its own thread."""

    def __init__(self, thing: Any, seat: str) -> None:
        self.thing, self._seat = thing, seat
        self._pool = ThreadPoolExecutor(1)

    def __getattr__(self, order: str) -> Any:
        if order == "gpu_seat":
            return SimpleNamespace(remote=lambda: self._pool.submit(lambda: self._seat))
        return SimpleNamespace(
            remote=lambda *arguments: self._pool.submit(getattr(self.thing, order), *arguments)
        )


class Run:
    """Trainers and instances on made-up GPUs, and what went through the host."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        trainers: str,
        instances: str,
        *,
        transport: str = "auto",
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Each digit is the GPU of one; `chunk_bytes`: of the version that was published before."""
        torch.set_num_threads(1)
        weights = pack_weights(tiny_pool.target(), name="target", weight_version=0, chunk_bytes=chunk_bytes)
        manifest = weights[0]
        self.layout = PublishedWeights(manifest=manifest, chunk_refs=())
        self.trainers = {
            f"trainer-{i}": Sitting(trainer_of(i, weights), seat) for i, seat in enumerate(trainers)
        }
        self.instances = {
            f"gen-{i}": Sitting(Instance(f"gen-{i}", weights), seat) for i, seat in enumerate(instances)
        }
        self.notes: list[str] = []
        share = {"num_gpus": 0.5}
        cluster = ClusterConfig.model_validate(
            {"trainer": share, "generation": share, "publication": {"transport": transport}}
        )
        self._loop = Broadcast(cluster, TrainerPool(self.trainers, cluster), self.notes.append)
        self.on_host = OnTheHost(monkeypatch)

    def learn(self) -> None:
        """Equally in each."""
        for trainer in self.trainers.values():
            learn(trainer.thing)

    def publish(self, version: int) -> PublishedWeights | None:
        return self._loop.publish(self.layout, version, self.instances)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(answer: Future, **names: Any) -> Any:
        return answer.result(timeout=60)

    monkeypatch.setattr(weight_broadcast, "get", get)
    monkeypatch.setattr(weight_broadcast, "num_nodes", lambda: 1)
    in_one_process(monkeypatch)


def test_two_trainers_serve_two_instances_each_and_no_weight_passes_through_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, "01", "0101")
    for version in (1, 2):
        run.learn()
        published = run.publish(version)
        assert published is not None and published.manifest.weight_version == version, run.notes
        learned = model_checksum(run.trainers["trainer-1"].thing._learner.model, like=WORDS)
        assert published.manifest.checksum == learned, "each instance has confirmed it"
        assert max(run.on_host.carried) <= 16 * len(published.manifest.tensors), "two sums a tensor"
    assert run.on_host.copied == []
    groups = {id(one.thing._broadcast) for one in run.trainers.values()}
    assert len(groups) == 2 and not run.notes


def test_gpus_of_their_own_are_served_from_device_to_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Gloo in NCCL's place, which needs GPUs: what it is given lies on the members' devices."""
    run, opened = Run(monkeypatch, "01", "23"), []
    stands_in = TrainerHere.open_broadcast

    def open_broadcast(trainer: Any, members: Any, form: str, room_bytes: int) -> Any:
        opened.append((form, members))
        return stands_in(trainer, members, "gloo_on_device", room_bytes)

    monkeypatch.setattr(TrainerHere, "open_broadcast", open_broadcast)
    run.learn()
    published = run.publish(1)
    assert published is not None and not run.notes and opened == [("nccl", ("gen-0", "gen-1"))]
    assert run.on_host.copied == [], "to the host"


def test_a_tensor_larger_than_a_chunk_is_broadcast_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an embedding of more than 32 MiB is; the version before has it in one chunk, larger than all others."""
    most = 4096
    monkeypatch.setattr(weight_broadcast, "CHUNK_BYTES", most)
    run = Run(monkeypatch, "0", "11", transport="broadcast", chunk_bytes=most)
    assert max(run.layout.manifest.chunk_num_bytes) > most
    run.learn()
    published = run.publish(1)
    assert published is not None and not run.notes, run.notes
    assert max(run.on_host.carried) <= most


def test_a_trainer_that_learned_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, "01", "01")
    run.learn()
    assert run.publish(1) is not None
    run.learn()
    with torch.no_grad():
        next(run.trainers["trainer-1"].thing._learner.model.parameters()).add_(1.0)
    assert run.publish(2) is None
    assert "trainer-1 and trainer-0 hold different weights of version 2" in run.notes[-1]
    for one in run.trainers.values():
        one.forwards_so_far.remote().result(timeout=60)
        assert one.thing._broadcast is None


@pytest.mark.slow
def test_trainers_with_a_part_of_every_weight_serve_the_same_whole_ones_at_once() -> None:
    """Each in a process, as on a GPU of its own: what passes between them is the gathering that one would do, too."""
    served = run_group(2, serve_from_a_shard)
    assert all(isinstance(one, dict) for one in served), served
    assert len({one["sent"] for one in served} | {each for one in served for each in one["loaded"]}) == 1
    whole = sum(parameter.numel() for parameter in tiny_pool.target().parameters())
    assert sum(one["held"] for one in served) == whole
    # two sums a tensor
    most = 16 * len(unique_tensors(tiny_pool.target()))
    assert all(max(carried) <= most and not copied for carried, copied in (one["bytes"] for one in served))
