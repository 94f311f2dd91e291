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

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

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
