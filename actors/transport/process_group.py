"""Channels over a private process group of two: what the back ends gloo and nccl share.

The listening side is rank 0 and owns the rendezvous; it joins in its first `recv`. The source is rank 1
and joins in `connect`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from actors.transport.base import Ticket, require_frame
from actors.transport.channel import ChannelLife, first_line, new_channel_id, require_usable
from actors.transport.rendezvous import Rendezvous, Store, meet
from core.errors import TransferError


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
        join: Callable[[], Pair],
        *,
        peer: str,
        channel: str,
        timeout_s: float,
        on_release: Callable[[PairEnd], None],
    ) -> None:
        self._join = join
        self._pair: Pair | None = None
        self._peer = peer
        self._timeout_s = timeout_s
        self._on_release = on_release
        self._life = ChannelLife(peer=peer, channel=channel, release=self._release)

    def open(self) -> None:
        """Join the group. Raises TransferError."""
        with self._life.waiting(f"{self._peer} to join", RuntimeError):
            self._joined()

    def send(self, frame: np.ndarray) -> None:
        """Send one frame (see `Sender`)."""
        require_frame(frame, writable=False)
        # torch wraps no read-only memory without a warning; such frames are rare and copied.
        frame = frame if frame.flags.writeable else frame.copy()
        with self._life.waiting(f"{self._peer} to take {frame.size} bytes", RuntimeError):
            self._joined().send(frame, self._timeout_s)

    def recv(self, into: np.ndarray) -> None:
        """Receive one frame (see `Receiver`)."""
        require_frame(into, writable=True)
        with self._life.waiting(f"{into.size} bytes from {self._peer}", RuntimeError):
            deadline_s = time.monotonic() + self._timeout_s
            pair = self._joined()
            pair.recv(into, max(deadline_s - time.monotonic(), 0.001))

    def close(self) -> None:
        """Leave the group (see `Sender`)."""
        self._life.close()

    def _joined(self) -> Pair:
        if self._pair is None:
            self._pair = self._join()
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
        self._rendezvous: Rendezvous | None = None
        self._ends: set[PairEnd] = set()
        self._is_closed = False

    def listen(self, peer: str) -> tuple[PairEnd, Ticket]:
        """See `Transport`."""
        ticket = Ticket(backend=self.name, channel=new_channel_id(), host=self._host)
        require_usable(ticket, peer=peer, backend=self.name, is_closed=self._is_closed)
        try:
            ticket = replace(ticket, port=self._served().port)
        except (RuntimeError, OSError) as error:
            raise TransferError(
                peer=peer,
                channel=ticket.channel,
                awaited=f"a free port on {self._host}",
                got=first_line(error),
                advice="is it an address of this node?",
            ) from error
        return self._end(ticket, peer, rank=0), ticket

    def connect(self, ticket: Ticket, peer: str) -> PairEnd:
        """See `Transport`."""
        require_usable(ticket, peer=peer, backend=self.name, is_closed=self._is_closed)
        end = self._end(ticket, peer, rank=1)
        end.open()
        return end

    def close(self) -> None:
        """See `Transport`."""
        with self._lock:
            self._is_closed = True
            ends = list(self._ends)
            rendezvous, self._rendezvous = self._rendezvous, None
        for end in ends:
            end.close()
        if rendezvous is not None:
            rendezvous.close()
        self._release()

    def _open_pair(self, store: Store, rank: int) -> Pair:
        """Join the group of two that meets in `store`. Raises RuntimeError."""
        raise NotImplementedError

    def _release(self) -> None:
        """Free what the channels shared."""

    def _end(self, ticket: Ticket, peer: str, rank: int) -> PairEnd:
        def join() -> Pair:
            store = meet(
                host=ticket.host, port=ticket.port, channel=ticket.channel, timeout_s=self._timeout_s
            )
            return self._open_pair(store, rank)

        def release(end: PairEnd) -> None:
            self._ends.discard(end)
            rendezvous = self._rendezvous
            # Not before: the source may still be reading what it needs to join.
            if rank == 0 and rendezvous is not None:
                rendezvous.forget(ticket.channel)

        end = PairEnd(
            join,
            peer=peer,
            channel=ticket.channel,
            timeout_s=self._timeout_s,
            on_release=release,
        )
        with self._lock:
            self._ends.add(end)
        return end

    def _served(self) -> Rendezvous:
        with self._lock:
            if self._rendezvous is None:
                self._rendezvous = Rendezvous(host=self._host, timeout_s=self._timeout_s)
            return self._rendezvous
