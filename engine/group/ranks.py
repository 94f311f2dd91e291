"""What the ranks of a group say to each other: the leader's orders, and sums over all ranks.

A decode step is one order, two sums a layer and one exchange of choices. Sums are gathered and added by the tree of
`engine.parts`, never in a ring: their bits do not depend on the number of ranks. Numbers lie in memory that all ranks
see, since they are processes of one machine, and sockets say when they are there.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...core.errors import RlhfSpecError, WeightsError
from ..cache.shared_memory import SharedFile
from ..parts import PARTS, Share
from .meeting import Buckets, Meeting, buckets_of
from .rank_sockets import Peer, meet_peers

_LENGTH_BYTES = 8
_TAKEN = torch.zeros(0, dtype=torch.uint8)
"What ranks meet with once all have taken their share of a bucket: nothing."


class GroupError(RlhfSpecError):
    """A rank of a group is gone or did not answer: the instance is lost as one."""


class EndedEarly(WeightsError):
    """The leader could not load a weight version: no rank decodes from what there is of it."""


class GroupRanks:
    """One rank's end of a group. See `engine.model.linears.Ranks`. Used by one thread."""

    def __init__(self, peers: Mapping[int, Peer], share: Share, *, instance: str, timeout_s: float) -> None:
        """Take over the ways to the other ranks.

        Args:
            peers: by rank.
            share: of this rank.
            instance: in errors.
            timeout_s: for an answer to what this rank has sent; the leader's next order is awaited without.

        Raises GroupError: a rank has ended.
        """
        self.share = share
        self._peers = peers
        self._instance = instance
        self._timeout_s = timeout_s
        self.on_lost: Callable[[GroupError], None] | None = None
        "called before a GroupError is raised"
        self.num_orders = self.num_sums = self.num_exchanges = self._num_met = 0
        self._meeting = Meeting(self._shared("rlhfspec-sums"), share)
        self._weights = Buckets(self._shared("rlhfspec-weights"))
        # the others have reached each other too: the folder where they met may go
        self._meet(_TAKEN)

    @property
    def is_leader(self) -> bool:
        """Whether this rank gives the orders."""
        return self.share.rank == 0

    def close(self) -> None:
        """Leave the group."""
        for peer in self._peers.values():
            peer.close()

    def add_up(self, x: Float[Tensor, "M N"], part: Float[Tensor, "M N"]) -> None:
        """See `Ranks.add_up`. Raises GroupError."""
        self.num_sums += 1
        parts = self._meet(part)
        total = parts[0] + parts[1]
        if self.share.ranks == PARTS:
            total += parts[2] + parts[3]
        x.add_(total)

    def exchange(self, mine: Tensor) -> Tensor:
        """Return what all ranks have of the same shape, [ranks, ...]. Raises GroupError."""
        self.num_exchanges += 1
        return self._meet(mine).clone()

    def order(self, kind: str, **what: Any) -> None:
        """Tell the other ranks what to do next, in what pickle takes; nothing where this is not the leader."""
        if not self.is_leader:
            return
        self.num_orders += 1
        data = pickle.dumps((kind, what), protocol=5)
        self._send(len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    def give(self, file: SharedFile) -> None:
        """Let the other ranks open a file behind the last order; nothing where this is not the leader."""
        if self.is_leader:
            self._to_all(lambda peer: peer.give(file, self._timeout_s))

    def given(self) -> SharedFile:
        """On the other ranks: take the file behind the last order. Raises GroupError: the leader is gone."""
        try:
            return self._peers[0].taken(self._timeout_s)
        except OSError as error:
            raise self._lost(0, error) from error

    def next_order(self) -> tuple[str, dict[str, Any]]:
        """Wait for the leader's next order. Raises GroupError: the leader is gone."""
        length = bytearray(_LENGTH_BYTES)
        self._fill(0, length, timeout_s=None)
        data = bytearray(int.from_bytes(length, "little"))
        self._fill(0, data, self._timeout_s)
        kind, what = pickle.loads(data)
        return kind, what

    def hand_on(
        self, names: Collection[str], parts: Iterable[Mapping[str, Tensor]]
    ) -> Generator[Mapping[str, Tensor]]:
        """Show a version of these weights to the other ranks, bucket by bucket as it comes; not the leader: pass it on.

        Each bucket lies in memory that all ranks see until all have taken their share of it. Raises GroupError.
        """
        if not self.is_leader:
            yield from parts
            return
        left = set(names)
        self.order("load", names=list(names))
        try:
            for bucket in buckets_of(parts):
                left -= bucket.keys()
                self.order("bucket", written=self._weights.write(bucket))
                try:
                    yield bucket
                finally:
                    self._meet(_TAKEN)
        except BaseException:
            self.order("buckets_end", is_whole=False)
            raise
        self.order("buckets_end", is_whole=not left)

    def buckets(self) -> Iterator[Mapping[str, Tensor]]:
        """What the leader shows, on the other ranks. Raises EndedEarly where that was no whole version."""
        while True:
            kind, what = self.next_order()
            if kind == "buckets_end" and what["is_whole"]:
                return
            if kind != "bucket":
                raise EndedEarly(f"instance {self._instance}: the leader could not load a weight version")
            yield self._weights.read(what["written"])
            self._meet(_TAKEN)

    def _shared(self, name: str) -> SharedFile:
        file = SharedFile.new(name) if self.is_leader else self.given()
        self.give(file)
        return file

    def _meet(self, mine: Tensor) -> Tensor:
        """Return all ranks' [ranks, ...]; to be read before this rank's next meeting."""
        try:
            everyone = self._meeting.put(mine)
        except OSError as error:
            raise self._lost(self.share.rank, error) from error
        self._num_met += 1
        ready, said = self._num_met.to_bytes(_LENGTH_BYTES, "little"), bytearray(_LENGTH_BYTES)
        self._send(ready)
        for rank in self._peers:
            self._fill(rank, said, self._timeout_s)
            if said != ready:
                raise self._lost(rank, OSError("what belongs to another step"))
        return everyone

    def _send(self, data: bytes | memoryview) -> None:
        self._to_all(lambda peer: peer.send(data, self._timeout_s))

    def _to_all(self, tell: Callable[[Peer], None]) -> None:
        for rank, peer in self._peers.items():
            try:
                tell(peer)
            except OSError as error:
                raise self._lost(rank, error) from error

    def _fill(self, rank: int, into: bytearray | memoryview, timeout_s: float | None) -> None:
        try:
            self._peers[rank].fill(into, timeout_s)
        except OSError as error:
            raise self._lost(rank, error) from error

    def _lost(self, rank: int, error: OSError) -> GroupError:
        lost = GroupError(
            f"instance {self._instance}: rank {self.share.rank} of {self.share.ranks} waited for rank {rank} and got: "
            f"{error}; the instance is lost"
        )
        if self.on_lost is not None:
            self.on_lost(lost)
        return lost


def joined(
    folder: str,
    rank: int,
    num_ranks: int,
    *,
    instance: str,
    start_timeout_s: float,
    step_timeout_s: float,
    watch: Callable[[], None] = lambda: None,
) -> GroupRanks:
    """Meet the other ranks in a folder of this machine; seconds until all are there, and for a step.

    Raises TimeoutError: not all came in time; what `watch` raises, which is called meanwhile.
    """
    peers = meet_peers(Path(folder), rank, num_ranks, timeout_s=start_timeout_s, watch=watch)
    share = Share(rank=rank, ranks=num_ranks)
    return GroupRanks(peers, share, instance=instance, timeout_s=step_timeout_s)
