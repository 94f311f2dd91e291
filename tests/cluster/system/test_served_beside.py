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

from rlhfspec.actors.actor_messages import GenerationSpec, TrainerSpec
from rlhfspec.actors.generation.engine_host import ManifestHost
from rlhfspec.actors.remote import actor_start
from rlhfspec.actors.transport.broadcast import BroadcastGroup, join_broadcast
from rlhfspec.actors.workers.trainer_actor import TrainerActor
from rlhfspec.cluster.system import weight_broadcast
from rlhfspec.cluster.system.trainer_pool import TrainerPool
from rlhfspec.cluster.system.weight_broadcast import Broadcast
from rlhfspec.cluster.weights.publish import PublishedWeights
from rlhfspec.core.config import (
    AlgorithmConfig,
    ClusterConfig,
    EngineConfig,
    SpeculationConfig,
    TrainerConfig,
)
from rlhfspec.core.weight_records import WORDS
from rlhfspec.engine.weights.chunks import model_checksum, pack_weights
from rlhfspec.engine.weights.digests import HostMirror
from tests.helpers import tiny_pool
from tests.helpers.windows import without_a_gpu

CPU = torch.device("cpu")
LOCAL = "127.0.0.1"
TrainerHere = TrainerActor.__ray_metadata__.modified_class


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


class Instance:
    """What a generation actor does of a broadcast."""

    def __init__(self, name: str, weights: Any) -> None:
        self._name = name
        self.host = ManifestHost(
            GenerationSpec(
                instance=name,
                engine=EngineConfig(max_running_samples=1, probe=False),
                speculation=SpeculationConfig(drafter="none", policy="off"),
                dtype="float32",
                max_total_tokens=40,
                vocab_size=tiny_pool.VOCAB_SIZE,
                report_interval_s=1.0,
            )
        )
        self.host.load_weights(*weights)

    def join_broadcast(self, ticket: Any, rank: int, timeout_s: float) -> None:
        self._group = join_broadcast(
            ticket, rank=rank, me=self._name, host=LOCAL, timeout_s=timeout_s, device=CPU
        )

    def receive_weights(self, timeout_s: float, layout: Any) -> Any:
        return self.host.receive_weights(layout, self._group)


def trainer_of(rank: int, weights: Any) -> Any:
    made = TrainerHere(
        TrainerSpec(
            name=f"trainer-{rank}",
            rank=rank,
            algorithm=AlgorithmConfig(kind="grpo", kl_coef=0.0),
            trainer=TrainerConfig(num_threads=1),
            drafter_training=None,
            dtype="float32",
            temperature=1.0,
            seed=0,
            pad_token_id=0,
            vocab_size=tiny_pool.VOCAB_SIZE,
            checksums="words",
        )
    )
    made.load_weights(weights[0], *weights[1])
    return made


class Run:
    """Trainers and instances on made-up GPUs, and what went through the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, trainers: str, instances: str) -> None:
        """Each digit is the GPU of one."""
        torch.set_num_threads(1)
        manifest, _ = weights = pack_weights(tiny_pool.target(), name="target", weight_version=0)
        self.layout = PublishedWeights(manifest=manifest, chunk_refs=())
        self.trainers = {
            f"trainer-{i}": Sitting(trainer_of(i, weights), seat) for i, seat in enumerate(trainers)
        }
        self.instances = {
            f"gen-{i}": Sitting(Instance(f"gen-{i}", weights), seat) for i, seat in enumerate(instances)
        }
        self.notes: list[str] = []
        share = {"num_gpus": 0.5}
        cluster = ClusterConfig.model_validate({"trainer": share, "generation": share})
        self._loop = Broadcast(cluster, TrainerPool(self.trainers, cluster), self.notes.append)
        self.carried: list[int] = []
        "bytes of each tensor that a group of Gloo was given"
        self.copied: list[int] = []
        "bytes of each bucket that was copied to the host"
        begin, of = BroadcastGroup._begin, HostMirror.of

        def counted(group: Any, how: Any, tensor: torch.Tensor, *rest: Any) -> Any:
            self.carried.append(tensor.nbytes)
            return begin(group, how, tensor, *rest)

        def mirrored(mirror: Any, bucket: torch.Tensor) -> Any:
            self.copied.append(bucket.nbytes)
            return of(mirror, bucket)

        monkeypatch.setattr(BroadcastGroup, "_begin", counted)
        monkeypatch.setattr(HostMirror, "of", mirrored)

    def learn(self) -> None:
        """As an update does: equally in each."""
        for trainer in self.trainers.values():
            learner = trainer.thing._learner
            learner.weight_version += 1
            with torch.no_grad():
                for parameter in learner.model.parameters():
                    parameter.mul_(1.0 + 1 / 64)

    def publish(self, version: int) -> PublishedWeights | None:
        return self._loop.publish(self.layout, version, self.instances)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(answer: Future, **names: Any) -> Any:
        return answer.result(timeout=60)

    monkeypatch.setattr(weight_broadcast, "get", get)
    monkeypatch.setattr(weight_broadcast, "num_nodes", lambda: 1)
    monkeypatch.setattr("rlhfspec.actors.workers.trainer_actor.ray.util.get_node_ip_address", lambda: LOCAL)
    # Ray would start to tell it, and the heap is that of all tests
    monkeypatch.setattr(actor_start, "_own_name", lambda: None)
    nothing = SimpleNamespace(unfreeze=lambda: None, collect=lambda: None, freeze=lambda: None)
    monkeypatch.setattr(actor_start, "gc", nothing)
    without_a_gpu(monkeypatch)


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
    assert run.copied == [] and max(run.carried) <= 64, "headers, and a number for who has read"
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
    assert run.copied == [], "to the host"


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
