"""Buckets of one reach all; whoever is dead or silent ends the wait by name.

The form for devices runs here with Gloo in NCCL's place: what it asks of a group is the same.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import pytest
import torch

from rlhfspec.actors.transport.broadcast import BroadcastForm, BroadcastGroup, BroadcastHost, join_broadcast
from rlhfspec.core.errors import WaitTimeout, WeightsError
from tests.helpers.windows import without_a_gpu

LOCAL = "127.0.0.1"
CPU = torch.device("cpu")
FORMS: list[BroadcastForm] = ["gloo", "gloo_on_device", "shared"]
ROOM_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def _windows(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_gpu(monkeypatch)


def bytes_of(length: int) -> torch.Tensor:
    return torch.zeros(length, dtype=torch.uint8)


def group_of(
    members: int, timeout_s: float = 20.0, form: BroadcastForm = "gloo"
) -> tuple[BroadcastGroup, list[BroadcastGroup]]:
    names = tuple(f"gen-{i}" for i in range(members))
    host = BroadcastHost(host=LOCAL, members=names, form=form, device=CPU, room_bytes=ROOM_BYTES)
    with ThreadPoolExecutor(members) as pool:
        joined = [
            pool.submit(
                join_broadcast,
                host.ticket,
                rank=1 + i,
                me=f"gen-{i}",
                host=LOCAL,
                timeout_s=timeout_s,
                device=CPU,
            )
            for i in range(members)
        ]
        root = host.join(timeout_s)
        return root, [each.result(timeout=60) for each in joined]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("members", [1, 3])
def test_every_member_gets_every_bucket_and_behind_the_last_what_they_are_compared_by(
    members: int, form: BroadcastForm
) -> None:
    root, others = group_of(members, form=form)
    assert {end.device for end in (root, *others)} == {None if form == "gloo" else CPU}
    buckets = [torch.arange(n, dtype=torch.uint8) for n in (200, 1, 77)]
    sums = torch.tensor([[1, 2], [-(1 << 63), (1 << 63) - 1]])
    with ThreadPoolExecutor(members) as pool:

        def take(end: BroadcastGroup) -> tuple[list[bytes], list[list[int]]]:
            came = []
            for bucket in buckets:
                came.append(end.receive(bytes_of(len(bucket)), "a bucket").numpy().tobytes())
                end.release("a bucket")
            return came, end.of_trainer(torch.zeros_like(sums), "the sums").tolist()

        taken = [pool.submit(take, end) for end in others]
        for bucket, room in zip(buckets, in_turn(root), strict=False):
            root.send(room[: len(bucket)].copy_(bucket), "a bucket")
        root.of_trainer(sums, "the sums")
        want = [bucket.numpy().tobytes() for bucket in buckets], sums.tolist()
        assert [each.result(timeout=60) for each in taken] == [want] * members


def test_a_bucket_in_the_window_stays_until_every_member_has_released_it() -> None:
    root, others = group_of(2, form="shared")
    rooms = in_turn(root)
    first, second, third = (next(rooms)[:1].fill_(value) for value in (1, 2, 3))
    # in turn, there are two of them
    assert third.data_ptr() == first.data_ptr()
    first.fill_(1)
    with ThreadPoolExecutor(3) as pool:
        root.send(first, "chunk 0")
        came = list(pool.map(lambda end: end.receive(bytes_of(1), "chunk 0"), others))
        assert [one.data_ptr() for one in came] == [first.data_ptr()] * 2, "read where it lies"
        released = pool.submit(others[0].release, "chunk 0")
        later = pool.submit(root.send, second, "chunk 1")
        with pytest.raises(TimeoutError):
            later.result(timeout=0.2)
        others[1].release("chunk 0")
        released.result(timeout=60), later.result(timeout=60)
        list(pool.map(lambda end: (end.receive(bytes_of(1), "chunk 1"), end.release("chunk 1")), others))
        root.settle()


def in_turn(root: BroadcastGroup) -> Iterator[torch.Tensor]:
    """Where the trainer packs."""
    rooms = root.rooms
    return cycle([bytes_of(ROOM_BYTES) for _ in range(rooms)] if isinstance(rooms, int) else rooms)


def test_a_member_that_never_comes_is_named() -> None:
    host = BroadcastHost(host=LOCAL, members=("gen-0",))
    with pytest.raises(WaitTimeout, match=r"trainer waited .* for gen-0 .* 0 of 1 came"):
        host.join(0.3)
    with pytest.raises(WaitTimeout, match=r"gen-0 waited .* for trainer"):
        join_broadcast(host.ticket, rank=1, me="gen-0", host=LOCAL, timeout_s=0.3)


@pytest.mark.parametrize("form", FORMS)
def test_a_silent_trainer_ends_the_wait_and_the_group(form: BroadcastForm) -> None:
    root, (member,) = group_of(1, timeout_s=0.5, form=form)
    with pytest.raises(WaitTimeout, match=r"gen-0 waited .* for trainer to answer 'pass on chunk 0"):
        member.receive(bytes_of(8), "chunk 0")
    with pytest.raises(WeightsError, match="has left the broadcast group"):
        member.receive(bytes_of(8), "chunk 0")
    root.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_dead_member_ends_the_trainers_wait_by_name(form: BroadcastForm) -> None:
    root, (living, dead) = group_of(2, timeout_s=2.0, form=form)
    dead.close()
    with pytest.raises(WaitTimeout, match=r"trainer waited .* for gen-0, gen-1 to answer 'pass on chunk \d"):
        # what fits the sockets' buffers is gone before anybody is missed
        for number in range(64):
            root.send(bytes_of(1 << 20), f"chunk {number}")
        root.settle()
    with pytest.raises(WeightsError, match="trainer has left the broadcast group"):
        root.send(bytes_of(8), "chunk 99")
    living.close()


def test_a_group_of_nccl_without_gpus_says_so() -> None:
    host = BroadcastHost(host=LOCAL, members=("gen-0",), form="nccl", device=CPU)
    with ThreadPoolExecutor(1) as pool:
        joins = pool.submit(
            join_broadcast, host.ticket, rank=1, me="gen-0", host=LOCAL, timeout_s=5.0, device=CPU
        )
        with pytest.raises(WaitTimeout, match="needs torch with NCCL and GPU 0, got 0 GPUs"):
            host.join(5.0)
        with pytest.raises(WaitTimeout, match=r"gen-0 waited .* for trainer"):
            joins.result(timeout=60)


@pytest.mark.parametrize("form", ["gloo", "shared"])
def test_a_bucket_of_another_size_is_refused(form: BroadcastForm) -> None:
    root, (member,) = group_of(1, timeout_s=2.0, form=form)
    sender = threading.Thread(target=lambda: root.send(bytes_of(9), "chunk 0"))
    sender.start()
    with pytest.raises(WeightsError, match="expected chunk 0 of 8 bytes, got 9;"):
        member.receive(bytes_of(8), "chunk 0")
    sender.join()
    root.close()
