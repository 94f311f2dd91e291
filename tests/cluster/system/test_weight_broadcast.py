"""Which group carries a version, and what serves where it fails. Actors are played here; no Ray, no sockets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfspec.actors.actor_messages import LoadedWeights, SentWeights
from rlhfspec.cluster.system import weight_broadcast
from rlhfspec.cluster.system.trainer_pool import TrainerPool
from rlhfspec.cluster.system.weight_broadcast import Broadcast, why_not_nccl
from rlhfspec.cluster.weights.publish import PublishedWeights
from rlhfspec.core.config import ClusterConfig
from rlhfspec.core.errors import InstanceLost, WaitTimeout
from rlhfspec.core.weight_records import TensorSpec, WeightManifest

LARGE, MIB = 300 << 20, 1 << 20
"Bytes of a tensor that is larger than a bucket anywhere."
LAYOUT = WeightManifest(
    model="target",
    weight_version=0,
    checksum="good",
    num_bytes=LARGE + MIB,
    chunk_num_bytes=(LARGE, MIB),
    chunk_checksums=(),
    tensors=(
        TensorSpec(name="a", dtype="bfloat16", shape=(LARGE // 2048, 1024), offset_bytes=0, num_bytes=LARGE),
        TensorSpec(name="b", dtype="bfloat16", shape=(512, 1024), offset_bytes=LARGE, num_bytes=MIB),
    ),
    hf_config_json="{}",
)


class Actor:
    """Answers every order by its name; an error is raised where the answer is awaited."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.orders = answers, []

    def __getattr__(self, order: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.orders.append((order, arguments))
            answer = self.answers.get(order)
            return answer(*arguments) if callable(answer) else answer

        return SimpleNamespace(remote=remote)


def confirmed(name: str) -> Callable[..., LoadedWeights]:
    return lambda timeout_s, told: LoadedWeights(
        instance=name,
        model="target",
        weight_version=told.weight_version,
        checksum="good",
        load_s=0.25,
    )


def sent(told: WeightManifest, bucket_bytes: int) -> SentWeights:
    assert told.chunk_num_bytes == told.in_chunks_of(bucket_bytes).chunk_num_bytes
    return SentWeights(manifest=replace(told, checksum="good"), pack_s=1.0)


class Played:
    """A trainer, instances with these GPUs, and what was noted."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *seats: str | None,
        num_gpus: float = 1.0,
        transport: str = "nccl",
        more_trainers: tuple[str, ...] = (),
    ) -> None:
        def get(answer: Any, **names: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(weight_broadcast, "get", get)
        monkeypatch.setattr(weight_broadcast, "num_nodes", lambda: 1)
        self.trainer = Actor(gpu_seat=seats[0], broadcast=sent)
        self.instances = {
            f"gen-{i}": Actor(gpu_seat=seat, receive_weights=confirmed(f"gen-{i}"))
            for i, seat in enumerate(seats[1:])
        }
        self.notes: list[str] = []
        cluster = ClusterConfig.model_validate(
            {
                "publication": {"transport": transport},
                "generation": {"num_gpus": num_gpus},
                "trainer": {"num_gpus": num_gpus},
            }
        )
        self.trainers = {"trainer": self.trainer} | {
            f"trainer-{i}": Actor(gpu_seat=seat, broadcast=sent) for i, seat in enumerate(more_trainers, 1)
        }
        self._broadcast = Broadcast(cluster, TrainerPool(self.trainers, cluster), self.notes.append)

    def publish(self, version: int) -> PublishedWeights | None:
        layout = PublishedWeights(manifest=LAYOUT, chunk_refs=())
        return self._broadcast.publish(layout, version, self.instances)

    def served(self) -> dict[str, list[tuple[str, ...]]]:
        """Whom each trainer has opened groups for."""
        return {
            name: [arguments[0] for order, arguments in trainer.orders if order == "open_broadcast"]
            for name, trainer in self.trainers.items()
        }

    def forms(self) -> list[str]:
        return [arguments[1] for order, arguments in self.trainer.orders if order == "open_broadcast"]


def test_members_with_gpus_of_their_own_form_an_nccl_group(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, "GPU 0 of node a", "GPU 1 of node a", "GPU 0 of node b")
    for version in (1, 2):
        published = played.publish(version)
        assert published is not None and published.manifest.weight_version == version
        send_s = published.part_seconds.pop("send")
        assert published.part_seconds == {"pack": 1.0, "load": 0.25} and send_s >= 0.0
    assert played.forms() == ["nccl"] and not played.notes, "made once"


@pytest.mark.parametrize(
    ("seats", "why"),
    [
        (("GPU 0 of node a", "GPU 1 of node a", "GPU 1 of node a"), "gen-0 and gen-1 share GPU 1 of node a"),
        (
            ("GPU 0 of node a", "GPU 0 of node a", "GPU 1 of node a"),
            "trainer and gen-0 share GPU 0 of node a",
        ),
        (("GPU 0 of node a", "GPU 1 of node a", None), "gen-1 is on a CPU"),
        ((None, "GPU 0 of node a"), "trainer is on a CPU"),
    ],
)
def test_a_shared_gpu_or_a_cpu_means_gloo_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, seats: tuple[str | None, ...], why: str
) -> None:
    names = ["trainer", *(f"gen-{i}" for i in range(len(seats) - 1))]
    assert why_not_nccl(dict(zip(names, seats, strict=True))) == why
    played = Played(monkeypatch, *seats)
    assert played.publish(1) is not None
    played.instances["gen-0"], played.instances["gen-9"] = (
        played.instances["gen-0"],
        Actor(receive_weights=confirmed("gen-9")),
    )
    assert played.publish(2) is not None
    assert played.forms() == ["gloo", "gloo"]
    assert played.notes == [f"weights go through the host (Gloo), not over NCCL: {why}"]


def test_without_gpus_nobody_is_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, None, None, num_gpus=0, transport="broadcast")
    assert played.publish(1) is not None and played.forms() == ["gloo"] and not played.notes
    assert "gpu_seat" not in {order for order, _ in played.trainer.orders}


def test_an_nccl_group_that_fails_gives_way_to_gloo_and_that_to_the_object_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = Played(monkeypatch, "GPU 0 of node a", "GPU 1 of node a")
    well = played.trainer.answers["broadcast"]
    played.trainer.answers["broadcast"] = silent("trainer")
    assert played.publish(1) is None
    assert "the object store carries weights this once, a Gloo group from then on" in played.notes[-1]
    played.trainer.answers["broadcast"] = well
    assert played.publish(2) is not None and played.forms() == ["nccl", "gloo"]
    played.trainer.answers["broadcast"] = silent("trainer")
    assert played.publish(3) is None and "from here on" in played.notes[-1]
    assert played.publish(4) is None and played.forms() == ["nccl", "gloo"], "not tried again"


def test_after_a_death_nccl_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, "GPU 0 of node a", "GPU 1 of node a")
    dead = InstanceLost("gen-0 died while the loop waited")
    played.instances["gen-0"].answers["receive_weights"] = lambda *_: dead
    assert played.publish(1) is None and "this once" in played.notes[-1] and "Gloo" not in played.notes[-1]
    del played.instances["gen-0"]
    played.instances["gen-1"] = Actor(gpu_seat="GPU 1 of node a", receive_weights=confirmed("gen-1"))
    assert played.publish(2) is not None and played.forms() == ["nccl", "nccl"]


def test_members_on_one_gpu_read_the_trainers_buckets_there(monkeypatch: pytest.MonkeyPatch) -> None:
    one = "GPU 0 of node a"
    played = Played(monkeypatch, one, one, one, num_gpus=0.3, transport="auto")
    for version in (1, 2):
        published = played.publish(version)
        assert published is not None and published.manifest.weight_version == version
    assert played.forms() == ["shared"] and not played.notes, "made once, whatever transport is named"
    (_, arguments) = next(order for order in played.trainer.orders if order[0] == "broadcast")
    assert arguments[0].checksum == "words:", "the digest of devices"
    played.trainer.answers["broadcast"] = silent("trainer")
    assert played.publish(3) is None and "from here on" in played.notes[-1]
    assert played.publish(4) is None and played.forms() == ["shared"], "not tried again"


def test_gpus_of_their_own_take_nccl_unasked_and_where_some_share_one_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Played(monkeypatch, "GPU 0 of node a", "GPU 1 of node a", "GPU 2 of node a", transport="auto")
    assert own.publish(1) is not None and own.forms() == ["nccl"] and not own.notes
    own.trainer.answers["broadcast"] = silent("trainer")
    assert own.publish(2) is None and own.notes[-1].endswith("the object store carries weights from here on")
    assert own.publish(3) is None and own.forms() == ["nccl"], "not tried again"
    seats = ("GPU 0 of node a", "GPU 1 of node a", "GPU 1 of node a")
    crowded = Played(monkeypatch, *seats, transport="auto")
    assert crowded.publish(1) is None and crowded.publish(2) is None and not crowded.forms()
    why = "gen-0 and gen-1 share GPU 1 of node a"
    assert crowded.notes == [f"weights go through the object store, not over NCCL: {why}"]
    assert [order for order, _ in crowded.trainer.orders].count("gpu_seat") == 1, "nobody came or went"
    named = Played(monkeypatch, *seats, transport="broadcast")
    assert named.publish(1) is not None and named.forms() == ["gloo"] and not named.notes
    stored = Played(monkeypatch, seats[0], seats[0], transport="object_store")
    assert stored.publish(1) is None and not stored.forms()


CARDS = tuple(f"GPU {i} of node a" for i in range(4))


def test_each_of_several_trainers_serves_the_instances_on_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seats = (CARDS[0], CARDS[0], CARDS[2], CARDS[2])
    played = Played(monkeypatch, *seats, num_gpus=0.4, transport="auto", more_trainers=CARDS[1:3])
    assert played.publish(1) is not None and played.publish(2) is not None and not played.notes
    assert played.served() == {"trainer": [("gen-0",)], "trainer-1": [], "trainer-2": [("gen-1", "gen-2")]}
    orders = {name: [order for order, _ in one.orders] for name, one in played.trainers.items()}
    assert [orders[name].count("broadcast") for name in orders] == [2, 0, 2]
    assert orders["trainer-1"].count("follow") == 2, "it holds a part of every weight"
    ranks = [
        next(arguments[1] for order, arguments in one.orders if order == "join_broadcast")
        for one in played.instances.values()
    ]
    assert ranks == [1, 1, 2]


def test_an_instance_on_a_gpu_without_a_trainer_is_served_as_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Played(
        monkeypatch, *CARDS[:2], CARDS[3], num_gpus=0.4, transport="auto", more_trainers=(CARDS[1],)
    )
    assert beside.publish(1) is not None and beside.forms() == ["nccl"], "the second trainer is in no group"
    assert beside.served() == {"trainer": [("gen-0", "gen-1")], "trainer-1": []}


def test_trainers_that_hold_different_weights_are_named_and_the_first_ones_are_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = Played(
        monkeypatch, CARDS[0], *CARDS[:2], num_gpus=0.4, transport="auto", more_trainers=(CARDS[1],)
    )
    assert played.publish(1) is not None
    played.trainers["trainer-1"].answers["broadcast"] = lambda told, _: SentWeights(
        manifest=replace(told, checksum="odd"), pack_s=1.0
    )
    assert played.publish(2) is None
    assert "trainer-1 and trainer hold different weights of version 2" in played.notes[-1]
    assert all("close_broadcast" in dict(one.orders) for one in played.trainers.values())


def silent(name: str) -> Callable[..., Exception]:
    return lambda *_: WaitTimeout(
        waiter="trainer", waited_for="gen-0", order="pass on chunk 0", waited_s=30.0, advice="none"
    )
