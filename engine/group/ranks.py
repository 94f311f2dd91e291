"""What the ranks of a group say to each other: the leader's orders, and sums over all ranks.

A decode step is one order, two sums a layer and one exchange of choices. Sums are gathered and added by the tree of
`engine.parts`, never in a ring: their bits do not depend on the number of ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed
from jaxtyping import Float
from torch import Tensor

from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.engine.parts import PARTS, Share

_distributed: Any = torch.distributed
SHORT_ORDER = 1 << 14
"Bytes that every order takes; a longer one takes a second broadcast."
_LENGTH_BYTES = 8


class GroupError(RlhfSpecError):
    """A rank of a group is gone or did not answer: the instance is lost as one."""


class GroupRanks:
    """One rank's end of a process group. See `engine.model.linears.Ranks`. Used by one thread."""

    def __init__(self, group: Any, *, instance: str = "local", timeout_s: float = 600.0) -> None:
        """Take over a joined group.

        Args:
            group: a `torch.distributed.ProcessGroup` of 2 or 4, all on one machine.
            instance: in errors.
            timeout_s: for an answer to what this rank has sent; the leader's next order is awaited without.
        """
        self.share = Share(rank=group.rank(), ranks=group.size())
        self._group: Any = group
        self._instance = instance
        self._timeout = timedelta(seconds=timeout_s)
        self.on_lost: Callable[[GroupError], None] | None = None
        "called before a GroupError is raised"
        self._gathered = torch.empty(0)
        self.num_orders = self.num_sums = self.num_exchanges = 0

    @property
    def is_leader(self) -> bool:
        """Whether this rank gives the orders."""
        return self.share.rank == 0

    def close(self) -> None:
        """Leave the group."""
        self._group = None

    def add_up(self, x: Float[Tensor, "M N"], part: Float[Tensor, "M N"]) -> None:
        """See `Ranks.add_up`. Raises GroupError."""
        self.num_sums += 1
        if self._gathered.numel() < self.share.ranks * part.numel():
            self._gathered = part.new_empty(self.share.ranks * part.numel())
        parts = self._gathered[: self.share.ranks * part.numel()].view(self.share.ranks, *part.shape)
        self._all_gather(parts, part)
        total = parts[0].add_(parts[1])
        if self.share.ranks == PARTS:
            total.add_(parts[2].add_(parts[3]))
        x.add_(total)

    def exchange(self, mine: Tensor) -> Tensor:
        """Return what all ranks have of the same shape, [ranks, ...]. Raises GroupError."""
        self.num_exchanges += 1
        everyone = mine.new_empty(self.share.ranks, *mine.shape)
        self._all_gather(everyone, mine)
        return everyone

    def order(self, kind: str, **what: Any) -> None:
        """Tell the other ranks what to do next, in what pickle takes; nothing where this is not the leader."""
        if not self.is_leader:
            return
        self.num_orders += 1
        data = pickle.dumps((kind, what), protocol=5)
        whole = np.frombuffer(len(data).to_bytes(_LENGTH_BYTES, "little") + data, dtype=np.uint8)
        first = np.zeros(SHORT_ORDER, dtype=np.uint8)
        first[: len(whole)] = whole[:SHORT_ORDER]
        self._broadcast(torch.from_numpy(first))
        if len(whole) > SHORT_ORDER:
            self._broadcast(torch.from_numpy(whole[SHORT_ORDER:].copy()))

    def next_order(self) -> tuple[str, dict[str, Any]]:
        """Wait for the leader's next order. Raises GroupError: the leader is gone."""
        first = torch.empty(SHORT_ORDER, dtype=torch.uint8)
        self._broadcast(first, timeout=timedelta(days=365))
        data = first.numpy().tobytes()
        missing = int.from_bytes(data[:_LENGTH_BYTES], "little") + _LENGTH_BYTES - SHORT_ORDER
        if missing > 0:
            rest = torch.empty(missing, dtype=torch.uint8)
            self._broadcast(rest)
            data += rest.numpy().tobytes()
        kind, what = pickle.loads(data[_LENGTH_BYTES:])
        return kind, what

    def hand_on(self, parts: Iterable[Mapping[str, Tensor]]) -> Iterator[Mapping[str, Tensor]]:
        """Pass a weight version's parts to the other ranks as they come; where this is not the leader, only here."""
        if not self.is_leader:
            yield from parts
            return
        is_whole = False
        try:
            for part in parts:
                specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in part.items()]
                self.order("part", specs=specs)
                for tensor in part.values():
                    self._broadcast(_as_bytes(tensor.detach().contiguous()))
                yield part
            is_whole = True
        finally:
            self.order("parts_end", is_whole=is_whole)

    def parts(self) -> Iterator[Mapping[str, Tensor]]:
        """What the leader hands on, on the other ranks. Raises GroupError where it ends before its end."""
        while True:
            kind, what = self.next_order()
            if kind == "parts_end" and what["is_whole"]:
                return
            if kind != "part":
                raise GroupError(f"instance {self._instance}: the leader could not load a weight version")
            part = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in what["specs"]}
            for tensor in part.values():
                self._broadcast(_as_bytes(tensor))
            yield part

    def _all_gather(self, into: Tensor, mine: Tensor) -> None:
        flat = mine.contiguous().view(-1)
        self._wait(self._group._allgather_base(into.view(-1), flat), self._timeout)

    def _broadcast(self, tensor: Tensor, *, timeout: timedelta | None = None) -> None:
        options: Any = torch.distributed.BroadcastOptions()  # type: ignore[attr-defined]
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timeout or self._timeout
        self._wait(self._group.broadcast([tensor], options), timeout or self._timeout)

    def _wait(self, work: Any, timeout: timedelta) -> None:
        try:
            work.wait(timeout)
        except RuntimeError as error:
            lost = GroupError(
                f"instance {self._instance}: rank {self.share.rank} of {self.share.ranks} waited for the others "
                f"(at most {timeout.total_seconds():g} s) and got: {str(error).splitlines()[0]}; the instance is lost"
            )
            if self.on_lost is not None:
                self.on_lost(lost)
            raise lost from error


def joined(
    store: str, rank: int, num_ranks: int, *, instance: str, start_timeout_s: float, step_timeout_s: float
) -> GroupRanks:
    """Meet the other ranks at the file `store` of this machine, over Gloo; seconds until all are there, and for a step.

    Raises RuntimeError: not all came in time.
    """
    options = _distributed.ProcessGroupGloo._Options()
    options._devices = [_distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads, options._timeout = 1, timedelta(seconds=start_timeout_s)
    group = _distributed.ProcessGroupGloo(_distributed.FileStore(store, num_ranks), rank, num_ranks, options)
    return GroupRanks(group, instance=instance, timeout_s=step_timeout_s)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
