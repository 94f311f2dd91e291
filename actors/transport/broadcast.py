"""A process group in which rank 0, a trainer, hands buckets of weights to all its instances at once.

Each bucket goes out as a header (its size and its XXH3 digest) and its bytes, while the next is packed. The group is
private: outside torch.distributed's global state, and given up at the first failure. Gloo carries buckets of the host;
NCCL, where that is asked for and every member has a GPU of its own, carries them from device to device. Members that
share one GPU read the trainer's buckets where they lie, and Gloo carries the headers and who has read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor

from ...core.errors import PlacementError, WaitTimeout, WeightsError
from . import device_window
from .channels import new_channel_id, reason_of
from .device_group import abort, finish, open_nccl, within
from .rendezvous import StarStore, accept, close_listener, open_listener, reach

_ProcessGroupGloo: Any = torch.distributed.ProcessGroupGloo
_HEADER_BYTES = 64
"Size as 16 decimal digits, the window's room as 2, then the digest with its kind, and spaces."
_ADVICE = "the object store carries the weights instead"
BroadcastForm = Literal["gloo", "nccl", "shared", "gloo_on_device"]
"""`shared` is of members on one GPU; the last is NCCL's way of going about it with Gloo in its place, for tests without
a GPU."""
NUM_ROOMS = 2
"Of a window: one is read while the next is packed."


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastTicket:
    """Where a group meets."""

    host: str
    port: int
    group: str
    size: int
    "members, the trainer included"
    form: BroadcastForm = "gloo"
    window: device_window.Offered = ()
    "the way to the trainer's buckets, for members on its GPU"
    trainer: str = "trainer"
    "its name"

    @property
    def on_devices(self) -> bool:
        """Whether buckets lie on each member's device, and not on the host."""
        return self.form != "gloo"


class BroadcastGroup:
    """One end of a group."""

    def __init__(
        self,
        group: Any,
        *,
        me: str,
        others: str,
        timeout_s: float,
        device: torch.device | None = None,
        window: Tensor | None = None,
    ) -> None:
        """Wrap a group that stands.

        Args:
            group: the process group.
            me: name of this end, for errors.
            others: names of the others, for errors.
            timeout_s: of every wait.
            device: where buckets lie, of a group on devices; None: on the host.
            window: the trainer's buckets, uint8 [NUM_ROOMS, n], where all members can read them.
        """
        self._group, self._me, self._others, self._timeout_s = group, me, others, timeout_s
        self.device, self._window = device, window
        self._is_hosts = device is None or window is not None
        "the group itself carries what lies on the host"
        self._under_way: list[tuple[Any, Any, str]] = []

    @property
    def rooms(self) -> Sequence[Tensor] | int:
        """Where buckets are to be packed, in turn: buffers, uint8 [n] each, or so many of the packer's own."""
        return NUM_ROOMS if self._window is None else tuple(self._window)

    def send(self, bucket: Tensor, digest: str, what: str) -> None:
        """Begin to send a bucket, uint8 [n], when the one before has been taken; it must stay as it is until then.

        Raises WaitTimeout.
        """
        self.settle()
        room = 0
        if self._window is not None:
            room = (bucket.data_ptr() - self._window.data_ptr()) // self._window.shape[1]
        text = f"{len(bucket):016d}{room:02d}{digest}".ljust(_HEADER_BYTES)
        header = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self._place)
        self._under_way.append((self._broadcast(header, what), header, what))
        if self._window is None:
            self._under_way.append((self._broadcast(bucket, what), bucket, what))
        else:
            self._under_way.append((self._all_have_read(what), bucket, what))

    def settle(self) -> None:
        """Wait until everything sent has been taken. Raises WaitTimeout."""
        while self._under_way:
            work, _, what = self._under_way[0]
            self._wait(work, what)
            self._under_way.pop(0)

    def receive(self, into: Tensor, what: str) -> str:
        """Fill `into`, uint8 [n], and return its digest as told. Raises WaitTimeout, WeightsError."""
        header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8, device=self._place)
        self._wait(self._broadcast(header, what), what)
        text = bytes(header.tolist()).decode("ascii", "replace")
        if not text[:18].isdigit() or int(text[:16]) != len(into):
            raise WeightsError(
                f"{self._me}: expected {what} of {len(into)} bytes, got '{text.rstrip()}'; {_ADVICE}"
            )
        if self._window is None:
            self._wait(self._broadcast(into, what), what)
        else:
            into.copy_(self._window[int(text[16:18]), : len(into)])
            if into.device.type == "cuda":
                torch.cuda.current_stream(into.device).synchronize()
            self._wait(self._all_have_read(what), what)
        return text[18:].rstrip()

    def close(self) -> None:
        """Leave the group; whoever waits in it is told."""
        group, self._group, self._window = self._group, None, None
        if group is not None and self._place.type == "cuda":
            abort(group, self._place)
        self._under_way = []

    @property
    def _place(self) -> torch.device:
        """Where what the group carries itself lies."""
        return torch.device("cpu") if self._is_hosts else self.device or torch.device("cpu")

    def _all_have_read(self, what: str) -> Any:
        """Begin to wait until every member has said that it has read the bucket."""
        options: Any = torch.distributed.AllreduceOptions()  # type: ignore[attr-defined]
        options.timeout = timedelta(seconds=self._timeout_s)
        return self._begin("allreduce", torch.zeros(1), options, what)

    def _broadcast(self, tensor: Tensor, what: str) -> Any:
        options: Any = torch.distributed.BroadcastOptions()  # type: ignore[attr-defined]
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self._timeout_s)
        return self._begin("broadcast", tensor, options, what)

    def _begin(self, how: Literal["broadcast", "allreduce"], tensor: Tensor, options: Any, what: str) -> Any:
        if self._group is None:
            raise WeightsError(f"{self._me} has left the broadcast group before {what}; {_ADVICE}")
        try:
            return getattr(self._group, how)([tensor], options)
        except RuntimeError as error:
            raise self._failed(what, error, 0.0) from error

    def _wait(self, work: Any, what: str) -> None:
        began_s = time.monotonic()
        try:
            if self._is_hosts:
                work.wait(timedelta(seconds=self._timeout_s))
            else:
                finish(work, self._timeout_s)
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

    def __init__(
        self,
        *,
        host: str,
        members: tuple[str, ...],
        form: BroadcastForm = "gloo",
        device: torch.device | None = None,
        room_bytes: int = 0,
        me: str = "trainer",
    ) -> None:
        """Listen at an address of this node, as the trainer `me`, for instances of these names. Raises OSError.

        `device` is where the trainer's buckets lie, in a group on devices; `room_bytes` the largest one's size, in one
        whose members read them there.
        """
        self._window = None
        if form == "shared":
            self._window = torch.empty(NUM_ROOMS, room_bytes, dtype=torch.uint8, device=device)
        self._listener = open_listener(host)
        self._members, self._device = members, device
        self.ticket = BroadcastTicket(
            host=host,
            port=self._listener.getsockname()[1],
            group=new_channel_id(),
            size=1 + len(members),
            form=form,
            window=() if self._window is None else device_window.offer(self._window),
            trainer=me,
        )

    def join(self, timeout_s: float) -> BroadcastGroup:
        """Wait for all members. Raises WaitTimeout."""
        ends_s, links, others = time.monotonic() + timeout_s, [], ", ".join(self._members)
        try:
            for _ in self._members:
                links.append(accept(self._listener, self.ticket.group, ends_s - time.monotonic()))
            store = StarStore(links, is_hub=True, timeout_s=ends_s - time.monotonic())
            group = _group(store, 0, self.ticket, timeout_s, device=self._device)
        except (OSError, RuntimeError, PlacementError) as error:
            for link in links:
                link.close()
            raise WaitTimeout(
                waiter=self.ticket.trainer,
                waited_for=others,
                order=f"join the broadcast group, {len(links)} of {len(self._members)} came ({reason_of(error)})",
                waited_s=timeout_s,
                advice=_ADVICE,
            ) from error
        finally:
            close_listener(self._listener)
        return BroadcastGroup(
            group,
            me=self.ticket.trainer,
            others=others,
            timeout_s=timeout_s,
            device=_placed(self.ticket, self._device),
            window=self._window,
        )


def join_broadcast(
    ticket: BroadcastTicket,
    *,
    rank: int,
    me: str,
    host: str,
    timeout_s: float,
    device: torch.device | None = None,
) -> BroadcastGroup:
    """Join a group as one of its instances, from the address `host` of this node. Raises WaitTimeout.

    `device` is where the instance's weights lie, in a group on devices.
    """
    try:
        link = reach(ticket.host, ticket.port, ticket.group, timeout_s)
        store = StarStore([link], is_hub=False, timeout_s=timeout_s)
        group = _group(store, rank, ticket, timeout_s, host=host, device=device)
        window = device_window.reach(ticket.window, _placed(ticket, device)) if ticket.window else None
    except (OSError, RuntimeError, PlacementError) as error:
        raise WaitTimeout(
            waiter=me,
            waited_for=ticket.trainer,
            order=f"let it into the broadcast group ({reason_of(error)})",
            waited_s=timeout_s,
            advice=_ADVICE,
        ) from error
    place = _placed(ticket, device)
    return BroadcastGroup(
        group, me=me, others=ticket.trainer, timeout_s=timeout_s, device=place, window=window
    )


def _placed(ticket: BroadcastTicket, device: torch.device | None) -> torch.device | None:
    return (device or torch.device("cpu")) if ticket.on_devices else None


def _group(
    store: StarStore,
    rank: int,
    ticket: BroadcastTicket,
    timeout_s: float,
    host: str | None = None,
    device: torch.device | None = None,
) -> Any:
    """The process group, once all members are known to be in it."""
    try:
        if ticket.form == "nccl":
            group = open_nccl(
                store, rank, ticket.size, device=device or torch.device("cpu"), timeout_s=timeout_s
            )
        else:
            group = _gloo(store, rank, ticket.size, host or ticket.host, timeout_s)
        if ticket.form != "shared" and (place := _placed(ticket, device)) is not None:
            _meet(group, place, timeout_s)
        store.finish()
        return group
    finally:
        store.close()


def _meet(group: Any, place: torch.device, timeout_s: float) -> None:
    """Let everyone take part once: NCCL makes its communicator with the first transfer, through the store."""
    options: Any = torch.distributed.BroadcastOptions()  # type: ignore[attr-defined]
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = timedelta(seconds=timeout_s)
    try:
        one = torch.zeros(1, dtype=torch.uint8, device=place)
        finish(within(lambda: group.broadcast([one], options), timeout_s, place), timeout_s)
    except RuntimeError:
        if place.type == "cuda":
            abort(group, place)
        raise


def _gloo(store: StarStore, rank: int, size: int, host: str, timeout_s: float) -> Any:
    options = _ProcessGroupGloo._Options()
    options._devices = [_ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 2
    options._timeout = timedelta(seconds=timeout_s)
    return _ProcessGroupGloo(store, rank, size, options)
