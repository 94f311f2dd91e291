"""Channels over a private process group of two: what the back ends gloo and nccl share.

The listening side is rank 0; its listener is open from `listen` on and it joins in its first `recv`. The source
is rank 1 and joins in `connect`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from ...core.errors import TransferError
from .channels import (
    ChannelLife,
    Ticket,
    new_channel_id,
    reason_of,
    require_frame,
    require_usable,
)
from .rendezvous import PairStore, accept, close_listener, open_listener, reach

_LEAST_WAIT_S = 0.001


class Pair(Protocol):
    """A joined group of two."""

    def send(self, frame: np.ndarray, timeout_s: float) -> None:
        """Send uint8 [n]. Raises RuntimeError, also when the peer takes nothing for `timeout_s`."""
        ...

    def recv(self, into: np.ndarray, timeout_s: float) -> None:
        """Fill uint8 [n]. Raises RuntimeError, also when nothing comes for `timeout_s`."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class PairEnd:
    """One end of a channel; the group is joined when first needed."""

    def __init__(
        self,
        join: Callable[[float], Pair],
        *,
        peer: str,
        channel: str,
        timeout_s: float,
        on_release: Callable[[PairEnd], None],
    ) -> None:
        """`join(timeout_s)` raises RuntimeError or OSError."""
        self._join = join
        self._pair: Pair | None = None
        self._peer = peer
        self._timeout_s = timeout_s
        self._on_release = on_release
        self._life = ChannelLife(peer=peer, channel=channel, release=self._release)

    def open(self) -> None:
        """Join the group. Raises TransferError."""
        with self._life.waiting(f"{self._peer} to join", RuntimeError, OSError):
            self._joined()

    def send(self, frame: np.ndarray) -> None:
        """Send one frame (see `Sender`)."""
        require_frame(frame, writable=False)
        # torch wraps no read-only memory without a warning; such frames are rare and copied.
        frame = frame if frame.flags.writeable else frame.copy()
        with self._life.waiting(f"{self._peer} to take {frame.size} bytes", RuntimeError, OSError):
            self._joined().send(frame, self._timeout_s)

    def recv(self, into: np.ndarray) -> None:
        """Receive one frame (see `Receiver`)."""
        require_frame(into, writable=True)
        with self._life.waiting(f"{into.size} bytes from {self._peer}", RuntimeError, OSError):
            ends_s = time.monotonic() + self._timeout_s
            self._joined().recv(into, max(ends_s - time.monotonic(), _LEAST_WAIT_S))

    def close(self) -> None:
        """Leave the group (see `Sender`)."""
        self._life.close()

    def _joined(self) -> Pair:
        if self._pair is None:
            self._pair = self._join(self._timeout_s)
        return self._pair

    def _release(self) -> None:
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()
        self._on_release(self)


class PairTransport:
    """A transport whose channels are process groups of two; a back end says how to join one."""

    name = ""

    def __init__(self, *, host: str, timeout_s: float) -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._ends: set[PairEnd] = set()
        self._is_closed = False

    def listen(self, peer: str) -> tuple[PairEnd, Ticket]:
        """See `Transport`."""
        channel = new_channel_id()
        try:
            listener = open_listener(self._host)
        except OSError as error:
            raise TransferError(
                peer=peer,
                channel=channel,
                awaited=f"a free port on {self._host}",
                got=reason_of(error),
                advice="is it an address of this node?",
            ) from error
        ticket = Ticket(backend=self.name, channel=channel, host=self._host, port=listener.getsockname()[1])

        def join(timeout_s: float) -> Pair:
            ends_s = time.monotonic() + timeout_s
            link = accept(listener, channel, timeout_s)
            close_listener(listener)
            return self._open_pair(self._store(link, ends_s), rank=0)

        return self._end(join, ticket, peer, at_end=lambda: close_listener(listener)), ticket

    def connect(self, ticket: Ticket, peer: str) -> PairEnd:
        """See `Transport`."""

        def join(timeout_s: float) -> Pair:
            ends_s = time.monotonic() + timeout_s
            link = reach(ticket.host, ticket.port, ticket.channel, timeout_s)
            return self._open_pair(self._store(link, ends_s), rank=1)

        end = self._end(join, ticket, peer, at_end=lambda: None)
        end.open()
        return end

    def close(self) -> None:
        """See `Transport`."""
        with self._lock:
            self._is_closed = True
            ends = list(self._ends)
        for end in ends:
            end.close()

    def _open_pair(self, store: PairStore, rank: int) -> Pair:
        """Join the group of two that meets in `store`; the pair closes it. Raises RuntimeError, OSError."""
        raise NotImplementedError

    def _store(self, link: socket.socket, ends_s: float) -> PairStore:
        return PairStore(link, timeout_s=max(ends_s - time.monotonic(), _LEAST_WAIT_S))

    def _end(
        self, join: Callable[[float], Pair], ticket: Ticket, peer: str, *, at_end: Callable[[], None]
    ) -> PairEnd:
        def release(end: PairEnd) -> None:
            at_end()
            self._ends.discard(end)

        end = PairEnd(join, peer=peer, channel=ticket.channel, timeout_s=self._timeout_s, on_release=release)
        with self._lock:
            is_closed = self._is_closed
            self._ends.add(end)
        try:
            require_usable(ticket, peer=peer, backend=self.name, is_closed=is_closed)
        except TransferError:
            end.close()
            raise
        return end
