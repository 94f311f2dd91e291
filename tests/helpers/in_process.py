"""Back end "memory": channels on queues within one process, with planted faults, to test protocols.

Transports that share a hub reach each other. Frames are copied once on their way, as on a wire.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rlhfspec.actors.transport.channels import (
    ChannelLife,
    Ticket,
    new_channel_id,
    require_frame,
    require_usable,
)

WINDOW_FRAMES = 4
"A sender waits while this many frames of its channel are unread."

_POLL_S = 0.02
"How often a waiting end looks whether the other has closed."


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """What goes wrong with the k-th frame that a transport sends, counted from 0 over all its channels."""

    drop: frozenset[int] = frozenset()
    duplicate: frozenset[int] = frozenset()
    corrupt: frozenset[int] = frozenset()
    "one bit in the middle of the frame is flipped"
    fail: frozenset[int] = frozenset()
    "the channel breaks, on both sides"
    delay_s: Mapping[int, float] = field(default_factory=dict)
    "the frame, and with it what follows on its channel, arrives that much later"


NO_FAULTS = FaultPlan()


@dataclass(slots=True)
class _Wire:
    """The queue of one channel: (when it arrives, its bytes)."""

    frames: queue.Queue[tuple[float, np.ndarray]] = field(
        default_factory=lambda: queue.Queue(maxsize=WINDOW_FRAMES)
    )
    broken: threading.Event = field(default_factory=threading.Event)


class MemoryHub:
    """Where the transports of one process find each other's channels."""

    def __init__(self) -> None:
        self.wires: dict[str, _Wire] = {}


class MemoryTransport:
    """Channels through a hub."""

    name = "memory"

    def __init__(
        self,
        hub: MemoryHub,
        *,
        timeout_s: float = 5.0,
        faults: FaultPlan = NO_FAULTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` gives the seconds that timeouts and planted delays are counted in."""
        self.clock = clock
        self._hub = hub
        self._timeout_s = timeout_s
        self._faults = faults
        self._lock = threading.Lock()
        self._num_sent = 0
        self._ends: list[MemoryEnd] = []
        self._is_closed = False

    def listen(self, peer: str) -> tuple[MemoryEnd, Ticket]:
        """See `Transport`."""
        ticket = Ticket(backend=self.name, channel=new_channel_id())
        require_usable(ticket, peer=peer, backend=self.name, is_closed=self._is_closed)
        self._hub.wires[ticket.channel] = _Wire()
        return self._end(ticket, peer), ticket

    def connect(self, ticket: Ticket, peer: str) -> MemoryEnd:
        """See `Transport`."""
        require_usable(ticket, peer=peer, backend=self.name, is_closed=self._is_closed)
        return self._end(ticket, peer)

    def close(self) -> None:
        """See `Transport`."""
        self._is_closed = True
        for end in self._ends:
            end.close()

    def next_faults(self) -> tuple[int, FaultPlan]:
        """The number of the frame that is about to be sent, and the plan."""
        with self._lock:
            self._num_sent += 1
            return self._num_sent - 1, self._faults

    def _end(self, ticket: Ticket, peer: str) -> MemoryEnd:
        wire = self._hub.wires[ticket.channel]
        end = MemoryEnd(self, wire, peer=peer, channel=ticket.channel, timeout_s=self._timeout_s)
        self._ends.append(end)
        return end


class MemoryEnd:
    """One end of a channel."""

    def __init__(
        self, transport: MemoryTransport, wire: _Wire, *, peer: str, channel: str, timeout_s: float
    ) -> None:
        self._transport = transport
        self._wire = wire
        self._peer = peer
        self._timeout_s = timeout_s
        self._life = ChannelLife(peer=peer, channel=channel, release=wire.broken.set)

    def send(self, frame: np.ndarray) -> None:
        """Send one frame (see `Sender`), or what the fault plan makes of it."""
        require_frame(frame, writable=False)
        with self._life.waiting(f"{self._peer} to take {frame.size} bytes", OSError):
            number, faults = self._transport.next_faults()
            if number in faults.fail:
                raise ConnectionError(f"the failure planted at frame {number}")
            if number in faults.drop:
                return
            sent = frame.copy()
            if number in faults.corrupt:
                sent[len(sent) // 2] ^= 1
            arrives_s = self._transport.clock() + faults.delay_s.get(number, 0.0)
            for _ in range(2 if number in faults.duplicate else 1):
                self._put((arrives_s, sent))

    def recv(self, into: np.ndarray) -> None:
        """Receive one frame (see `Receiver`)."""
        require_frame(into, writable=True)
        with self._life.waiting(f"{into.size} bytes from {self._peer}", OSError):
            frame = self._get()
            if frame.size != into.size:
                raise ConnectionError(f"{frame.size} bytes")
            into[:] = frame

    def close(self) -> None:
        """Break the channel (see `Sender`); what was sent can still be received."""
        self._life.close()

    def _put(self, item: tuple[float, np.ndarray]) -> None:
        clock = self._transport.clock
        ends_s = clock() + self._timeout_s
        while True:
            if self._wire.broken.is_set():
                raise ConnectionError("a channel closed by its peer")
            try:
                return self._wire.frames.put(item, timeout=_POLL_S)
            except queue.Full:
                if clock() > ends_s:
                    raise TimeoutError(f"{WINDOW_FRAMES} frames unread") from None

    def _get(self) -> np.ndarray:
        clock = self._transport.clock
        ends_s = clock() + self._timeout_s
        while True:
            # Looked at before the queue: what was sent before the peer closed is still received.
            was_broken = self._wire.broken.is_set()
            try:
                arrives_s, frame = self._wire.frames.get(timeout=0 if was_broken else _POLL_S)
            except queue.Empty:
                if was_broken:
                    raise ConnectionError("a channel closed by its peer") from None
                if clock() > ends_s:
                    raise TimeoutError("nothing") from None
                continue
            while clock() < min(arrives_s, ends_s):
                time.sleep(_POLL_S / 10)
            if arrives_s > ends_s:
                raise TimeoutError("nothing")
            return frame
