"""A process group in which rank 0, a trainer, hands buckets of weights to all its instances at once.

Buckets go out while the next is packed, and behind the last the checksums of all. The group is private: outside
torch.distributed's global state, and given up at the first failure. Gloo carries buckets of the host; NCCL, where that
is asked for and every member has a GPU of its own, carries them from device to device. Members that share one GPU read
the trainer's buckets where they lie, and Gloo carries which one, and who has read it.
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

    def placed(self, device: torch.device | None) -> torch.device | None:
        """Where a member's buckets lie, whose weights are on `device`; None: on the host."""
        return None if self.form == "gloo" else device or torch.device("cpu")


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

    def send(self, bucket: Tensor, what: str) -> None:
        """Begin to send a bucket, uint8 [n], when the one before has been taken; it must stay as it is until then.

        Raises WaitTimeout.
        """
        self.settle()
        room = 0
        if self._window is not None:
            _synchronize(bucket.device)
            room = (bucket.data_ptr() - self._window.data_ptr()) // self._window.shape[1]
        header = torch.tensor([len(bucket), room])
        if self._is_hosts:
            self._under_way.append((self._begin("broadcast", header, what), header, what))
        # of a window nothing is sent: who has read a bucket joins the sum
        how, sent = ("broadcast", bucket) if self._window is None else ("allreduce", torch.zeros(1))
        self._under_way.append((self._begin(how, sent, what), bucket, what))

    def settle(self) -> None:
        """Wait until everything sent has been taken. Raises WaitTimeout."""
        while self._under_way:
            work, _, what = self._under_way[0]
            self._wait(work, what)
            self._under_way.pop(0)

    def receive(self, into: Tensor, what: str) -> Tensor:
        """Return a bucket of the size of `into`: there, or where it lies until `release`.

        Raises WaitTimeout, and on the host WeightsError for another size: Gloo would end the process.
        """
        size, room = len(into), 0
        if self._is_hosts:
            size, room = self.of_trainer(torch.zeros(2, dtype=torch.int64), what).tolist()
        if size != len(into):
            raise WeightsError(f"{self._me}: expected {what} of {len(into)} bytes, got {size}; {_ADVICE}")
        if self._window is not None:
            return self._window[room, :size]
        self._wait(self._begin("broadcast", into, what), what)
        return into

    def release(self, what: str) -> None:
        """Let the trainer write over the bucket that came last: all that reads it was called. Raises WaitTimeout."""
        if self._window is not None:
            _synchronize(self._window.device)
            self._wait(self._begin("allreduce", torch.zeros(1), what), what)

    def of_trainer(self, table: Tensor, what: str) -> Tensor:
        """Return the trainer's table; members pass one of its shape. Raises WaitTimeout."""
        self.settle()
        here = table.to(self._place)
        self._wait(self._begin("broadcast", here, what), what)
        return here

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

    def _begin(self, how: Literal["broadcast", "allreduce"], tensor: Tensor, what: str) -> Any:
        if self._group is None:
            raise WeightsError(f"{self._me} has left the broadcast group before {what}; {_ADVICE}")
        try:
            return getattr(self._group, how)([tensor], _options(how, self._timeout_s))
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
            device=self.ticket.placed(self._device),
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
        at = ticket.placed(device)
        window = device_window.reach(ticket.window, at) if ticket.window else None
    except (OSError, RuntimeError, PlacementError) as error:
        raise WaitTimeout(
            waiter=me,
            waited_for=ticket.trainer,
            order=f"let it into the broadcast group ({reason_of(error)})",
            waited_s=timeout_s,
            advice=_ADVICE,
        ) from error
    return BroadcastGroup(group, me=me, others=ticket.trainer, timeout_s=timeout_s, device=at, window=window)


def _synchronize(device: torch.device) -> None:
    """Wait for what was called here; transfers have streams of their own."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


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
        if ticket.form != "shared" and (place := ticket.placed(device)) is not None:
            _meet(group, place, timeout_s)
        store.finish()
        return group
    finally:
        store.close()


def _meet(group: Any, place: torch.device, timeout_s: float) -> None:
    """Let everyone take part once: NCCL makes its communicator with the first transfer, through the store."""
    one, options = torch.zeros(1, dtype=torch.uint8, device=place), _options("broadcast", timeout_s)
    try:
        finish(within(lambda: group.broadcast([one], options), timeout_s, place), timeout_s)
    except RuntimeError:
        if place.type == "cuda":
            abort(group, place)
        raise


def _options(how: Literal["broadcast", "allreduce"], timeout_s: float) -> Any:
    """Of a collective call; rank 0 is the root."""
    options = getattr(torch.distributed, f"{how.capitalize()}Options")()
    options.timeout = timedelta(seconds=timeout_s)
    return options


def _gloo(store: StarStore, rank: int, size: int, host: str, timeout_s: float) -> Any:
    options = _ProcessGroupGloo._Options()
    options._devices = [_ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 2
    options._timeout = timedelta(seconds=timeout_s)
    return _ProcessGroupGloo(store, rank, size, options)
