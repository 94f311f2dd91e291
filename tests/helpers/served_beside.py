"""Trainers and instances of one process that bring each other new weights as actors do, on the host's memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfspec.actors.actor_messages import GenerationSpec, TrainerSpec
from rlhfspec.actors.generation.engine_host import ManifestHost
from rlhfspec.actors.remote import actor_start
from rlhfspec.actors.transport.broadcast import BroadcastGroup, join_broadcast
from rlhfspec.actors.workers.trainer_actor import TrainerActor
from rlhfspec.core.config import AlgorithmConfig, EngineConfig, SpeculationConfig, TrainerConfig
from rlhfspec.core.weight_records import DEVICE_BUCKET_BYTES, WORDS
from rlhfspec.engine.weights.chunks import pack_weights
from rlhfspec.engine.weights.digests import HostMirror
from rlhfspec.learning.training.sharded import Sharded
from tests.helpers import tiny_pool
from tests.helpers.windows import without_a_gpu

CPU = torch.device("cpu")
LOCAL = "127.0.0.1"
TrainerHere = TrainerActor.__ray_metadata__.modified_class


def in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for Ray, for GPUs' windows, and for what an actor does to its process."""
    monkeypatch.setattr("rlhfspec.actors.workers.trainer_actor.ray.util.get_node_ip_address", lambda: LOCAL)
    # Ray would start to tell it, and the heap is that of all tests
    monkeypatch.setattr(actor_start, "_own_name", lambda: None)
    nothing = SimpleNamespace(collect=lambda: None, freeze=lambda: None)
    monkeypatch.setattr(actor_start, "gc", nothing)
    without_a_gpu(monkeypatch)


class OnTheHost:
    """Counts what a publication takes through the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
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


def trainer_of(rank: int, weights: Any, trainers: Any = None) -> Any:
    """A trainer with these weights; `trainers`: the group that it has met."""
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
    made._trainers = trainers or made._trainers
    made.load_weights(weights[0], *weights[1])
    return made


def learn(trainer: Any) -> None:
    """As an update does."""
    learner = trainer._learner
    learner.weight_version += 1
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.mul_(1.0 + 1 / 64)


def serve_from_a_shard(rank: int) -> dict[str, Any]:
    """One of several trainers of a process each, with a part of every weight: it serves two instances beside it."""
    with pytest.MonkeyPatch.context() as monkeypatch, ThreadPoolExecutor(2) as pool:
        in_one_process(monkeypatch)
        weights = pack_weights(tiny_pool.target(), name="target", weight_version=0)
        trainer = trainer_of(rank, weights, Sharded(CPU))
        instances = [Instance(f"gen-{rank}-{i}", weights) for i in range(2)]
        layout = weights[0].in_chunks_of(DEVICE_BUCKET_BYTES)
        ticket = trainer.open_broadcast(("a", "b"), "shared", max(layout.chunk_num_bytes))
        joins = [pool.submit(one.join_broadcast, ticket, i, 30.0) for i, one in enumerate(instances, start=1)]
        trainer.join_broadcast(30.0)
        [join.result(timeout=60) for join in joins]
        on_host = OnTheHost(monkeypatch)
        learn(trainer)
        announced = replace(layout, weight_version=1, checksum=WORDS)
        loads = [pool.submit(one.receive_weights, 30.0, announced) for one in instances]
        sent = trainer.broadcast(announced, DEVICE_BUCKET_BYTES).manifest
        loaded = [load.result(timeout=60).checksum for load in loads]
        held = sum(held.numel() for _, held in trainer._trainers.held(trainer._learner.model))
    return {"sent": sent.checksum, "loaded": loaded, "held": held, "bytes": (on_host.carried, on_host.copied)}
