"""Back end "object_store": frames travel as Ray objects. It needs nothing but Ray and always works.

The receiving actor must have this method, in a concurrency group of its own so that a busy actor still
takes frames:

    @ray.method(concurrency_group="transfer")
    def deliver_frame(self, channel: str, sequence: int, frame: np.ndarray | None) -> str:
        return self._transport.deliver(channel, sequence, frame)

Frames that a full destination has refused so far are lost when the sender closes: close after the
acknowledgement. A killed destination is seen at once, a killed source at the timeout: nothing of it
connects here.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import ray
from ray.exceptions import RayError

from ...core.errors import TransferError
from ..remote.remote import Handle
from .channels import (
    ChannelLife,
    Ticket,
    new_channel_id,
    require_frame,
    require_usable,
)

IN_FLIGHT_FRAMES = 2
"Deliveries of a channel that were not answered yet."

WINDOW_FRAMES = 16
"Frames a destination keeps unread; the source offers further ones again until the timeout."

_OFFER_AGAIN_S = 0.005

Receipt = Literal["taken", "full", "gone"]


@dataclass(slots=True)
class _Mailbox:
    """Frames of one channel that arrived, by sequence number; None marks the end."""

    next_sequence: int = 0
    frames: dict[int, np.ndarray | None] = field(default_factory=dict)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def put(self, sequence: int, frame: np.ndarray | None) -> Receipt:
        """Keep a frame; one that was kept or read before is dropped."""
        with self.arrived:
            if sequence >= self.next_sequence + WINDOW_FRAMES:
                return "full"
            if sequence >= self.next_sequence:
                self.frames.setdefault(sequence, frame)
                self.arrived.notify_all()
            return "taken"

    def take(self, timeout_s: float) -> np.ndarray:
        """Wait for the next frame. Raises TimeoutError or ConnectionError."""
        with self.arrived:
            if not self.arrived.wait_for(lambda: self.next_sequence in self.frames, timeout_s):
                raise TimeoutError(f"nothing (frame {self.next_sequence} is missing)")
            frame = self.frames[self.next_sequence]
            if frame is None:
                raise ConnectionError("a channel closed by its peer")
            del self.frames[self.next_sequence]
            self.next_sequence += 1
            return frame


class ObjectStoreTransport:
    """Channels into the actor `handle`, which is asked for only by instances that listen."""

    name = "object_store"

    def __init__(self, *, handle: Handle = None, timeout_s: float = 5.0) -> None:
        self._handle = handle
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._ends: set[ObjectSender | ObjectReceiver] = set()
        self._is_closed = False

    def listen(self, peer: str) -> tuple[ObjectReceiver, Ticket]:
        """See `Transport`."""
        channel = new_channel_id()
        if self._handle is None:
            raise TransferError(
                peer=peer,
                channel=channel,
                awaited="the handle of the listening actor",
                got="none",
                advice="pass handle=ray.get_runtime_context().current_actor",
            )
        mailbox = _Mailbox()
        ticket = Ticket(backend=self.name, channel=channel, handle=self._handle)
        require_usable(ticket, peer=peer, backend=self.name, is_closed=self._is_closed)

        def release() -> None:
            with self._lock:
                self._mailboxes.pop(channel, None)
                self._ends.discard(receiver)

        life = ChannelLife(peer=peer, channel=channel, release=release)
        receiver = ObjectReceiver(life, mailbox, peer=peer, timeout_s=self._timeout_s)
        with self._lock:
            self._mailboxes[channel] = mailbox
            self._ends.add(receiver)
        return receiver, ticket

    def connect(self, ticket: Ticket, peer: str) -> ObjectSender:
        """See `Transport`. Nothing is waited for."""
        require_usable(ticket, peer=peer, backend=self.name, is_closed=self._is_closed)

        def release() -> None:
            sender.release()
            with self._lock:
                self._ends.discard(sender)

        life = ChannelLife(peer=peer, channel=ticket.channel, release=release)
        sender = ObjectSender(life, ticket, peer=peer, timeout_s=self._timeout_s)
        with self._lock:
            self._ends.add(sender)
        return sender

    def deliver(self, channel: str, sequence: int, frame: np.ndarray | None) -> Receipt:
        """Take a frame that `deliver_frame` was called with; from any thread."""
        with self._lock:
            mailbox = self._mailboxes.get(channel)
        return "gone" if mailbox is None else mailbox.put(sequence, frame)

    def close(self) -> None:
        """See `Transport`."""
        with self._lock:
            self._is_closed = True
            ends = list(self._ends)
        for end in ends:
            end.close()


class ObjectReceiver:
    """The destination's end: reads its mailbox."""

    def __init__(self, life: ChannelLife, mailbox: _Mailbox, *, peer: str, timeout_s: float) -> None:
        self._life = life
        self._mailbox = mailbox
        self._peer = peer
        self._timeout_s = timeout_s

    def recv(self, into: np.ndarray) -> None:
        """See `Receiver`."""
        require_frame(into, writable=True)
        with self._life.waiting(f"{into.size} bytes from {self._peer}", OSError):
            frame = self._mailbox.take(self._timeout_s)
            if frame.size != into.size:
                raise ConnectionError(f"{frame.size} bytes")
            into[:] = frame

    def close(self) -> None:
        """See `Receiver`. A wait under way ends at once."""
        self._life.close()
        self._mailbox.put(self._mailbox.next_sequence, None)


@dataclass(frozen=True, slots=True, eq=False)
class _Delivery:
    sequence: int
    frame: Any
    "reference to the frame in the object store"
    receipt: Any


class ObjectSender:
    """The source's end: puts frames into the object store and has them fetched."""

    def __init__(self, life: ChannelLife, ticket: Ticket, *, peer: str, timeout_s: float) -> None:
        self._life = life
        self._ticket = ticket
        self._peer = peer
        self._timeout_s = timeout_s
        self._num_sent = 0
        self._in_flight: list[_Delivery] = []
        self._is_released = False

    def send(self, frame: np.ndarray) -> None:
        """See `Sender`."""
        require_frame(frame, writable=False)
        with self._life.waiting(f"{self._peer} to take {frame.size} bytes", OSError, RayError):
            ends_s = time.monotonic() + self._timeout_s
            while len(self._in_flight) >= IN_FLIGHT_FRAMES:
                self._settle(ends_s)
            # The put copies the frame and leaves it readable until the destination has fetched it.
            self._offer(self._num_sent, ray.put(frame))
            self._num_sent += 1

    def close(self) -> None:
        """See `Sender`."""
        self._life.close()

    def release(self) -> None:
        """Tell the destination that nothing more comes."""
        if not self._is_released:
            self._is_released = True
            # The receiver may be dead, and Ray may have ended before us.
            with suppress(RayError, RuntimeError):
                self._ticket.handle.deliver_frame.remote(self._ticket.channel, self._num_sent, None)

    def _offer(self, sequence: int, frame: Any) -> None:
        receipt = self._ticket.handle.deliver_frame.remote(self._ticket.channel, sequence, frame)
        self._in_flight.append(_Delivery(sequence, frame, receipt))

    def _settle(self, ends_s: float) -> None:
        """Wait for a receipt and act on it."""
        receipts = [delivery.receipt for delivery in self._in_flight]
        remaining_s = max(0.0, ends_s - time.monotonic())
        ready, _ = ray.wait(receipts, num_returns=1, timeout=remaining_s)
        if not ready:
            raise TimeoutError(f"no receipt for {len(receipts)} frames")
        delivery = next(item for item in self._in_flight if item.receipt == ready[0])
        receipt: Receipt = ray.get(delivery.receipt)
        self._in_flight.remove(delivery)
        if receipt == "gone":
            raise ConnectionError("a channel closed by its peer")
        if receipt == "full":
            if remaining_s == 0.0:
                raise TimeoutError(f"{WINDOW_FRAMES} frames unread")
            time.sleep(_OFFER_AGAIN_S)
            self._offer(delivery.sequence, delivery.frame)
