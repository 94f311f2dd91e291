"""A process group (Gloo) in which rank 0, the trainer, hands buckets of weights to all instances at once.

Each bucket goes out as a header (its size and its XXH3 digest) and its bytes, while the next is packed. The group is
private: outside torch.distributed's global state, and given up at the first failure.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed

from actors.transport.channel import new_channel_id, reason_of
from actors.transport.rendezvous import accept, close_listener, open_listener, reach
from actors.transport.star_store import StarStore
from core.errors import WaitTimeout, WeightsError

_ProcessGroupGloo: Any = torch.distributed.ProcessGroupGloo
_HEADER_BYTES = 48
"Size as 16 decimal digits, then the digest's 32 hex digits."
_ADVICE = "the object store carries the weights instead"


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastTicket:
    """Where a group meets."""

    host: str
    port: int
    group: str
    size: int
    "members, the trainer included"


class BroadcastGroup:
    """One end of a group."""

    def __init__(self, group: Any, *, me: str, others: str, timeout_s: float) -> None:
        """Wrap a group that stands; `me` and `others` are names for errors, `timeout_s` of every wait."""
        self._group, self._me, self._others, self._timeout_s = group, me, others, timeout_s
        self._under_way: list[tuple[Any, Any, str]] = []

    def send(self, bucket: np.ndarray, digest: str, what: str) -> None:
        """Begin to send a bucket, when the one before has been taken; it must stay as it is until then."""
        self.settle()
        header = np.frombuffer(f"{len(bucket):016d}{digest}".encode(), np.uint8).copy()
        for part in (header, bucket):
            tensor = torch.from_numpy(part)
            self._under_way.append((self._broadcast(tensor, what), tensor, what))

    def settle(self) -> None:
        """Wait until everything sent has been taken. Raises WaitTimeout."""
        while self._under_way:
            work, _, what = self._under_way[0]
            self._wait(work, what)
            self._under_way.pop(0)

    def receive(self, into: np.ndarray, what: str) -> str:
        """Fill `into`, uint8 [n], and return its digest as told. Raises WaitTimeout, WeightsError."""
        header = np.zeros(_HEADER_BYTES, np.uint8)
        self._wait(self._broadcast(torch.from_numpy(header), what), what)
        text = header.tobytes().decode("ascii", "replace")
        if not text[:16].isdigit() or int(text[:16]) != len(into):
            raise WeightsError(f"{self._me}: expected {what} of {len(into)} bytes, got '{text}'; {_ADVICE}")
        self._wait(self._broadcast(torch.from_numpy(into), what), what)
        return text[16:]

    def close(self) -> None:
        """Leave the group; whoever waits in it is told."""
        self._group = None
        self._under_way = []

    def _broadcast(self, tensor: torch.Tensor, what: str) -> Any:
        options: Any = torch.distributed.BroadcastOptions()  # type: ignore[attr-defined]
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self._timeout_s)
        if self._group is None:
            raise WeightsError(f"{self._me} has left the broadcast group before {what}; {_ADVICE}")
        try:
            return self._group.broadcast([tensor], options)
        except RuntimeError as error:
            raise self._failed(what, error, 0.0) from error

    def _wait(self, work: Any, what: str) -> None:
        began_s = time.monotonic()
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise self._failed(what, error, time.monotonic() - began_s) from error

    def _failed(self, what: str, error: Exception, waited_s: float) -> WaitTimeout:
        self.close()
        return WaitTimeout(
            waiter=self._me,
            waited_for=self._others,
            order=f"pass on {what} ({reason_of(error)})",
            waited_s=waited_s,
            advice=_ADVICE,
        )


class BroadcastHost:
    """The trainer's side before the group stands: it listens."""

    def __init__(self, *, host: str, members: tuple[str, ...]) -> None:
        """Listen at an address of this node for instances of these names. Raises OSError."""
        self._listener = open_listener(host)
        self._members = members
        self.ticket = BroadcastTicket(
            host=host, port=self._listener.getsockname()[1], group=new_channel_id(), size=1 + len(members)
        )

    def join(self, timeout_s: float) -> BroadcastGroup:
        """Wait for all members. Raises WaitTimeout."""
        ends_s, links, others = time.monotonic() + timeout_s, [], ", ".join(self._members)
        try:
            for _ in self._members:
                links.append(accept(self._listener, self.ticket.group, ends_s - time.monotonic()))
            store = StarStore(links, is_hub=True, timeout_s=ends_s - time.monotonic())
            group = _group(store, 0, self.ticket, timeout_s)
        except (OSError, RuntimeError) as error:
            for link in links:
                link.close()
            raise WaitTimeout(
                waiter="trainer",
                waited_for=others,
                order=f"join the broadcast group, {len(links)} of {len(self._members)} came ({reason_of(error)})",
                waited_s=timeout_s,
                advice=_ADVICE,
            ) from error
        finally:
            close_listener(self._listener)
        return BroadcastGroup(group, me="trainer", others=others, timeout_s=timeout_s)


def join_broadcast(
    ticket: BroadcastTicket, *, rank: int, me: str, host: str, timeout_s: float
) -> BroadcastGroup:
    """Join a group as one of its instances, from the address `host` of this node. Raises WaitTimeout."""
    try:
        link = reach(ticket.host, ticket.port, ticket.group, timeout_s)
        store = StarStore([link], is_hub=False, timeout_s=timeout_s)
        group = _group(store, rank, ticket, timeout_s, host=host)
    except (OSError, RuntimeError) as error:
        raise WaitTimeout(
            waiter=me,
            waited_for="trainer",
            order=f"let it into the broadcast group ({reason_of(error)})",
            waited_s=timeout_s,
            advice=_ADVICE,
        ) from error
    return BroadcastGroup(group, me=me, others="trainer", timeout_s=timeout_s)


def _group(
    store: StarStore, rank: int, ticket: BroadcastTicket, timeout_s: float, host: str | None = None
) -> Any:
    options = _ProcessGroupGloo._Options()
    options._devices = [_ProcessGroupGloo.create_device(hostname=host or ticket.host)]
    options._threads = 2
    options._timeout = timedelta(seconds=timeout_s)
    try:
        group = _ProcessGroupGloo(store, rank, ticket.size, options)
        store.finish()
        return group
    finally:
        store.close()
