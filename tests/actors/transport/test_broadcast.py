"""Buckets of one reach all; whoever is dead or silent ends the wait by name."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from actors.transport.broadcast import BroadcastGroup, BroadcastHost, join_broadcast
from core.errors import WaitTimeout, WeightsError

LOCAL = "127.0.0.1"


def group_of(members: int, timeout_s: float = 20.0) -> tuple[BroadcastGroup, list[BroadcastGroup]]:
    host = BroadcastHost(host=LOCAL, members=tuple(f"gen-{i}" for i in range(members)))
    with ThreadPoolExecutor(members) as pool:
        joined = [
            pool.submit(
                join_broadcast, host.ticket, rank=1 + i, me=f"gen-{i}", host=LOCAL, timeout_s=timeout_s
            )
            for i in range(members)
        ]
        root = host.join(timeout_s)
        return root, [each.result(timeout=60) for each in joined]


@pytest.mark.parametrize("members", [1, 3])
def test_every_member_gets_every_bucket_and_its_digest(members: int) -> None:
    root, others = group_of(members)
    buckets = [np.arange(n, dtype=np.uint8) for n in (200, 1, 77)]
    with ThreadPoolExecutor(members) as pool:

        def take(end: BroadcastGroup) -> list[tuple[str, bytes]]:
            rooms = [np.zeros(len(bucket), np.uint8) for bucket in buckets]
            return [(end.receive(room, "a bucket"), room.tobytes()) for room in rooms]

        taken = [pool.submit(take, end) for end in others]
        for number, bucket in enumerate(buckets):
            root.send(bucket, f"{number:032x}", "a bucket")
        root.settle()
        want = [(f"{number:032x}", bucket.tobytes()) for number, bucket in enumerate(buckets)]
        assert [each.result(timeout=60) for each in taken] == [want] * members


def test_a_member_that_never_comes_is_named() -> None:
    host = BroadcastHost(host=LOCAL, members=("gen-0",))
    with pytest.raises(WaitTimeout, match=r"trainer waited .* for gen-0 .* 0 of 1 came"):
        host.join(0.3)
    with pytest.raises(WaitTimeout, match=r"gen-0 waited .* for trainer"):
        join_broadcast(host.ticket, rank=1, me="gen-0", host=LOCAL, timeout_s=0.3)


def test_a_silent_trainer_ends_the_wait_and_the_group() -> None:
    root, (member,) = group_of(1, timeout_s=0.5)
    with pytest.raises(WaitTimeout, match=r"gen-0 waited .* for trainer to answer 'pass on chunk 0"):
        member.receive(np.zeros(8, np.uint8), "chunk 0")
    with pytest.raises(WeightsError, match="has left the broadcast group"):
        member.receive(np.zeros(8, np.uint8), "chunk 0")
    root.close()


def test_a_bucket_of_another_size_is_refused() -> None:
    root, (member,) = group_of(1, timeout_s=2.0)
    sender = threading.Thread(target=lambda: root.send(np.zeros(9, np.uint8), "0" * 32, "chunk 0"))
    sender.start()
    with pytest.raises(WeightsError, match="expected chunk 0 of 8 bytes, got '0000000000000009"):
        member.receive(np.zeros(8, np.uint8), "chunk 0")
    sender.join()
    root.close()
