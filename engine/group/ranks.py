"""What the ranks of a group say to each other: the leader's orders, and sums over all ranks.

A decode step is one order, two sums a layer and one exchange of choices. Sums are gathered and added by the tree of
`engine.parts`, never in a ring: their bits do not depend on the number of ranks. An order is a header on the hosts and,
where it has tensors, one broadcast of all of them between devices.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...core.errors import InstanceLost, WeightsError
from ..parts import PARTS, Share
from ..weights.chunks import CHUNK_BYTES
from .collectives import Collectives, meet

_LENGTH_BYTES = 8
_HEAD_BYTES = 4096
"Of a header that are sent at once; what is left of a longer one follows."
_ALIGNED = 64
Order = tuple[str, tuple[Tensor, ...], dict[str, Any]]
"Its kind, and what it is about."
Sizes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


class GroupError(InstanceLost):
    """A rank of a group is gone or did not answer: the instance is lost as one."""


class EndedEarly(WeightsError):
    """The leader could not load a weight version: no rank decodes from what there is of it."""


class GroupRanks:
    """One rank's end of a group. See `engine.parts.Ranks`. Used by one thread."""

    def __init__(self, hosts: Collectives, devices: Collectives, share: Share, *, instance: str) -> None:
        """Take over what reaches the other ranks.

        Args:
            hosts: for headers.
            devices: for tensors.
            share: of this rank.
            instance: in errors.

        Raises GroupError: a rank has ended.
        """
        self.share, self.device = share, devices.device
        self._hosts: Collectives | None = hosts
        self._devices: Collectives | None = devices
        self._instance = instance
        self.on_lost: Callable[[GroupError], None] | None = None
        "called before a GroupError is raised"
        self.num_orders = self.num_sums = self.num_exchanges = 0
        self._waiting: list[Order] = []
        "on the leader: told with the next order"
        self._come: deque[Order] = deque()
        # the others have reached each other too: the folder where they met may go
        for everyone in (devices, hosts):
            self._gathered(torch.zeros(1, device=everyone.device), everyone)

    @property
    def is_leader(self) -> bool:
        """Whether this rank gives the orders."""
        return self.share.rank == 0

    def close(self) -> None:
        """Leave the group; the others see that."""
        self._hosts = self._devices = None

    def add_up(self, x: Float[Tensor, "M N"], part: Float[Tensor, "M N"]) -> None:
        """See `Ranks.add_up`. Raises GroupError."""
        self.num_sums += 1
        parts = self._gathered(part, self._devices)
        total = parts[0] + parts[1]
        if self.share.ranks == PARTS:
            total += parts[2] + parts[3]
        x.add_(total)

    def exchange(self, mine: Tensor) -> Tensor:
        """Return what all ranks have of the same shape, [ranks, ...]. Raises GroupError."""
        self.num_exchanges += 1
        return self._gathered(mine, self._devices)

    def later(self, kind: str, *tensors: Tensor, **what: Any) -> None:
        """See `Ranks.later`."""
        if self.is_leader:
            self._waiting.append((kind, tensors, what))

    def order(self, kind: str, *tensors: Tensor, **what: Any) -> None:
        """Tell the other ranks what to do next, in what pickle takes; nothing where this is not the leader."""
        if not self.is_leader:
            return
        self.num_orders += 1
        orders, self._waiting = [*self._waiting, (kind, tensors, what)], []
        sizes = [tuple((one.dtype, tuple(one.shape)) for one in with_it) for _, with_it, _ in orders]
        said = [(kind, of, what) for (kind, _, what), of in zip(orders, sizes, strict=True)]
        text = pickle.dumps(said, protocol=5)
        framed = bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        header = torch.frombuffer(framed, dtype=torch.uint8)
        head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
        head[: len(header)] = header[:_HEAD_BYTES]
        self._broadcast(self._hosts, head)
        if len(header) > _HEAD_BYTES:
            self._broadcast(self._hosts, header[_HEAD_BYTES:])
        if all_sizes := sum(sizes, ()):
            packed = self._room(all_sizes)
            tensors = sum((with_it for _, with_it, _ in orders), ())
            for place, tensor in zip(_views(packed, all_sizes), tensors, strict=True):
                place.copy_(tensor)
            self._broadcast(self._devices, packed)

    def next_order(self) -> Order:
        """Wait for the leader's next order. Raises GroupError: the leader is gone."""
        if not self._come:
            head = torch.empty(_HEAD_BYTES, dtype=torch.uint8)
            self._broadcast(self._hosts, head, at_any_time=True)
            length = int.from_bytes(head[:_LENGTH_BYTES].numpy().tobytes(), "little")
            rest = torch.empty(max(0, _LENGTH_BYTES + length - _HEAD_BYTES), dtype=torch.uint8)
            if len(rest):
                self._broadcast(self._hosts, rest)
            text = torch.cat([head[_LENGTH_BYTES:], rest])[:length]
            said: list[tuple[str, Sizes, dict[str, Any]]] = pickle.loads(text.numpy().tobytes())
            all_sizes = sum((of for _, of, _ in said), ())
            tensors: Iterator[Tensor] = iter(())
            if all_sizes:
                packed = self._room(all_sizes)
                self._broadcast(self._devices, packed)
                tensors = iter(_views(packed, all_sizes))
            self._come.extend((kind, tuple(next(tensors) for _ in of), what) for kind, of, what in said)
        return self._come.popleft()

    def hand_on(
        self, names: Collection[str], parts: Iterable[Mapping[str, Tensor]]
    ) -> Generator[Mapping[str, Tensor]]:
        """Show a version of these weights to the other ranks, bucket by bucket as it comes; not the leader: pass it on.

        Raises GroupError.
        """
        if not self.is_leader:
            yield from parts
            return
        left = set(names)
        self.order("load", names=list(names))
        try:
            for bucket in buckets_of(parts):
                left -= bucket.keys()
                self.order("bucket", *bucket.values(), names=list(bucket))
                yield bucket
        except BaseException:
            self.order("buckets_end", is_whole=False)
            raise
        self.order("buckets_end", is_whole=not left)

    def buckets(self) -> Iterator[Mapping[str, Tensor]]:
        """What the leader shows, on the other ranks. Raises EndedEarly where that was no whole version."""
        while True:
            kind, tensors, what = self.next_order()
            if kind == "buckets_end" and what["is_whole"]:
                return
            if kind != "bucket":
                raise EndedEarly(f"instance {self._instance}: the leader could not load a weight version")
            yield dict(zip(what["names"], tensors, strict=True))

    def _room(self, sizes: Sizes) -> Tensor:
        """Room for tensors behind one another, each aligned."""
        return torch.empty(sum(map(_aligned, sizes)), dtype=torch.uint8, device=self.device)

    def _gathered(self, mine: Tensor, over: Collectives | None) -> Tensor:
        try:
            assert over is not None
            return over.gather(mine)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _broadcast(self, over: Collectives | None, tensor: Tensor, *, at_any_time: bool = False) -> None:
        try:
            assert over is not None
            over.broadcast(tensor, at_any_time=at_any_time)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> GroupError:
        me, ranks = self.share.rank, self.share.ranks
        others = " or ".join(str(rank) for rank in range(ranks) if rank != me)
        lost = GroupError(
            f"instance {self._instance}: rank {me} of {ranks} waited for rank {others} and got: "
            f"{str(error).splitlines()[0].rpartition('] ')[2]}; the instance is lost"
        )
        if self.on_lost is not None:
            self.on_lost(lost)
        return lost


def _aligned(size: tuple[torch.dtype, tuple[int, ...]]) -> int:
    dtype, shape = size
    num_bytes = dtype.itemsize * torch.Size(shape).numel()
    return num_bytes + -num_bytes % _ALIGNED


def _views(packed: Tensor, sizes: Sizes) -> list[Tensor]:
    """View packed bytes as the tensors that they are of."""
    parts = packed.split([_aligned(size) for size in sizes])
    return [
        part[: dtype.itemsize * torch.Size(shape).numel()].view(dtype).view(shape)
        for part, (dtype, shape) in zip(parts, sizes, strict=True)
    ]


def buckets_of(parts: Iterable[Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Cut parts of a weight version into buckets of whole tensors; one that is larger is a bucket of its own."""
    for part in parts:
        bucket, used = dict[str, Tensor](), 0
        for name, tensor in part.items():
            if used and used + tensor.nbytes > CHUNK_BYTES:
                yield bucket
                bucket, used = {}, 0
            bucket[name] = tensor
            used += tensor.nbytes
        if bucket:
            yield bucket


def joined(
    folder: str,
    rank: int,
    num_ranks: int,
    *,
    instance: str,
    start_timeout_s: float,
    step_timeout_s: float,
    device: torch.device | None = None,
    watch: Callable[[], None] = lambda: None,
) -> GroupRanks:
    """Meet the other ranks in a folder of this machine; seconds until all are there, and for a step.

    `device`: of this rank; the CPU by default. `watch`: called about every second of waiting, now and later. Raises
    TimeoutError: not all came in time; what `watch` raises.
    """
    timeouts = {"start_timeout_s": start_timeout_s, "step_timeout_s": step_timeout_s}
    met = meet(Path(folder), rank, num_ranks, device or torch.device("cpu"), watch=watch, **timeouts)
    return GroupRanks(*met, Share(rank=rank, ranks=num_ranks), instance=instance)
