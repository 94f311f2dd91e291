"""What every transport offers: channels that carry frames of bytes one way between two instances.

A migration ships caches through one channel per direction, so opposite moves never wait for each other.
The destination listens and hands its ticket to the source by a control message; the source connects:

    receiver, ticket = transport.listen("gen-0")      # destination, gen-1
    sender = transport.connect(ticket, "gen-1")       # source, gen-0
    sender.send(frame)   ...   receiver.recv(into)    # a transfer thread on each side

Every wait ends after the transport's `timeout_s`. After an error a channel is dead: each later call
raises at once and callers open a new one. A frame that was sent may still be lost with its peer: only
an acknowledgement by control message says that it arrived.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...core.errors import TransferError

MAX_FRAME_BYTES = 1 << 30
"Longest frame a channel carries; callers cut what is longer."


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a source needs to connect to a destination that listens."""

    backend: str
    channel: str
    "id of the channel, never used twice"
    host: str = ""
    port: int = 0
    handle: Any = None
    "the receiving actor (object store only); such a ticket travels by Ray alone"


class Sender(Protocol):
    """The source's end of a channel; one thread sends, any thread may close."""

    def send(self, frame: np.ndarray) -> None:
        """Send a contiguous uint8 array [n]; on return it may be overwritten. Raises TransferError."""
        ...

    def close(self) -> None:
        """Let go of the channel; a second call does nothing."""
        ...


class Receiver(Protocol):
    """The destination's end of a channel; one thread receives, any thread may close."""

    def recv(self, into: np.ndarray) -> None:
        """Fill a contiguous uint8 array [n] with the next frame, exactly n bytes long.

        Raises TransferError.
        """
        ...

    def close(self) -> None:
        """Let go of the channel; a second call does nothing. A wait under way ends at its timeout."""
        ...


class Transport(Protocol):
    """Makes channels; one object per instance, safe to call from several threads."""

    @property
    def name(self) -> str:
        """Name of the back end: "gloo", "object_store" or "nccl"."""
        ...

    def listen(self, peer: str) -> tuple[Receiver, Ticket]:
        """Open a channel from `peer` to here, without waiting for it. Raises TransferError."""
        ...

    def connect(self, ticket: Ticket, peer: str) -> Sender:
        """Open the other end at the source, waiting for the destination's first `recv` where it must.

        Raises TransferError.
        """
        ...

    def close(self) -> None:
        """Close every channel and leave nothing behind; a second call does nothing."""
        ...


def require_frame(frame: np.ndarray, *, writable: bool) -> None:
    """Raise ValueError unless `frame` is a contiguous, non-empty array uint8 [n] of a length we carry."""
    if frame.dtype != np.uint8 or frame.ndim != 1 or not frame.flags.c_contiguous:
        raise ValueError(
            f"a frame is a contiguous uint8 array [n], got {frame.dtype} {list(frame.shape)}"
            f"{'' if frame.flags.c_contiguous else ' with strides'}; pass array.view(np.uint8).reshape(-1)"
        )
    if not 0 < frame.size <= MAX_FRAME_BYTES:
        raise ValueError(f"a frame has 1 to {MAX_FRAME_BYTES} bytes, got {frame.size}; cut it into several")
    if writable and not frame.flags.writeable:
        raise ValueError("cannot receive into a read-only array; pass a writable one")


_SOURCE_PLACE = re.compile(r"^\[[^\]]*\.(cc|cpp|h):\d+\]\s*")


def new_channel_id() -> str:
    """An id that no other channel of any process has, and nobody guesses: it is what lets a source in."""
    return secrets.token_hex(16)


class ChannelLife:
    """Turns what a back end raises into `TransferError`, and keeps a dead end dead.

    `release` frees what the end holds; it may be called more than once and from any thread.
    """

    def __init__(self, *, peer: str, channel: str, release: Callable[[], None]) -> None:
        self._peer = peer
        self._channel = channel
        self._release = release
        self._lock = threading.Lock()
        self._end: str | None = None

    @contextmanager
    def waiting(self, awaited: str, *caught: type[Exception]) -> Iterator[None]:
        """Wait for `awaited` in the body; errors of the kinds `caught` kill the end.

        Raises TransferError for them, and at once where the end is dead already.
        """
        began_s = time.monotonic()
        self.check(awaited)
        try:
            yield
            self.check(awaited)
        except (TransferError, *caught) as error:
            # Closed meanwhile, or a failure of the back end: what was opened meanwhile is freed as well.
            waited_s = time.monotonic() - began_s
            got = reason_of(error)
            self._die(f"failed earlier: {got}")
            if isinstance(error, TransferError):
                raise
            raise self._error(awaited, waited_s, got) from error

    def check(self, awaited: str) -> None:
        """Raise TransferError if this end is dead."""
        if self._end is not None:
            raise self._error(awaited, 0.0, f"a dead channel ({self._end})")

    def close(self) -> None:
        """End this life on purpose."""
        self._die("closed on this side")

    def _die(self, why: str) -> None:
        with self._lock:
            self._end = self._end or why
        self._release()

    def _error(self, awaited: str, waited_s: float, got: str) -> TransferError:
        return TransferError(
            peer=self._peer, channel=self._channel, awaited=awaited, waited_s=waited_s, got=got
        )


def require_usable(ticket: Ticket, *, peer: str, backend: str, is_closed: bool) -> None:
    """Raise TransferError unless a transport that is open and of the ticket's kind is asked."""
    if ticket.backend != backend:
        raise TransferError(
            peer=peer,
            channel=ticket.channel,
            awaited=f"a ticket of the transport {backend}",
            got=f"one of {ticket.backend}",
            advice="give every instance the same transport",
        )
    if is_closed:
        raise TransferError(
            peer=peer,
            channel=ticket.channel,
            awaited="an open transport",
            got="a closed one",
            advice="make a new transport",
        )


def reason_of(error: BaseException) -> str:
    """What an error says in one line, without the place in torch's sources that some begin with."""
    lines = [_SOURCE_PLACE.sub("", line.strip()) for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)
