"""Ships and receives the caches of samples on threads of their own, one per peer and direction.

The frames of one move carry its name in their sequence numbers. A source that stops early sends one frame
marked ABORTED, so that the channel stays usable.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.config import ReallocationConfig
from ...core.errors import TransferError
from ...engine.cache.leases import Lease, LeaseEnded
from ...engine.exchange import CachePiece
from ...policies.migration.cache_frames import Frame
from ..trace_events import TraceKind
from ..transport.channels import Sender, Ticket, Transport
from ..transport.frames import claimed_sequence, frame_bytes, open_frame, seal
from ..transport.paced import Paced

logger = logging.getLogger(__name__)
ABORTED = (1 << 48) - 1
NoteEvent = Callable[[TraceKind, float, float, str], None]


@dataclass(slots=True, eq=False)
class _Open:
    ticket: Ticket
    end: Any
    began_s: float = 0.0
    "when the first frame of the last transfer was there"


class Transfers:
    """The transfer threads of one instance. Methods return at once; `done` callbacks run on those threads."""

    def __init__(
        self, transport: Transport, settings: ReallocationConfig, note: NoteEvent = lambda *span: None
    ) -> None:
        """`note(kind, begin_s, end_s, label)` is told of every transfer."""
        self._transport = transport
        self._note = note
        self._settings = settings
        self._senders: dict[str, _Open] = {}
        self._receivers: dict[str, _Open] = {}
        self._known: dict[str, str] = {}
        "channel to each destination, from its ticket's arrival on"
        self._broken: dict[str, str] = {}
        "the channel to each destination that failed last"
        self._threads: dict[tuple[str, str], ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        "held while an end is put in its place or taken from it"

    def open_channel(self, destination: str) -> str:
        """The channel to a destination that is open here, or being opened; "" when there is none."""
        return self._known.get(destination, "")

    def broken_channel(self, destination: str) -> str:
        """The channel to a destination that failed here last; "" when none did."""
        return self._broken.get(destination, "")

    def listen(self, source: str, *, known_channel: str, broken_channel: str) -> Ticket | None:
        """Be ready to receive from a source; None when the channel it knows is still good. Raises TransferError."""
        found = self._receivers.get(source)
        if found is not None and found.ticket.channel != broken_channel:
            # two moves are prepared at once: the second shares the channel whose ticket is on its way
            return None if found.ticket.channel == known_channel else found.ticket
        if found is not None:
            found.end.close()
        receiver, ticket = self._transport.listen(source)
        with self._lock:
            self._receivers[source] = _Open(ticket, receiver)
        return ticket

    def ship(
        self,
        destination: str,
        ticket: Ticket | None,
        move_id: str,
        frames: Sequence[Frame],
        lease: Lease,
        done: Callable[[str], object],
    ) -> None:
        """Send leased caches; `done` gets what failed, "" when all was sent."""
        self._note_ticket(destination, ticket)

        def job() -> None:
            began_s = time.monotonic()
            try:
                sender = self._sender(destination, ticket)
                error = self._send_all(sender, move_id, frames, lease)
            except TransferError as failure:
                self._lose_sender(destination, ticket)
                error = str(failure)
            self._note("send", began_s, time.monotonic(), f"{move_id} to {destination}")
            done(error)

        self._run("to", destination, job)

    def send_nothing(self, destination: str, ticket: Ticket | None, frames: Sequence[Frame]) -> None:
        """Tell a destination that waits for frames that none will come."""
        if ticket is not None and self.open_channel(destination) not in ("", ticket.channel):
            # a ticket this late must not displace the channel that came after it
            return
        self._note_ticket(destination, ticket)

        def job() -> None:
            try:
                self._abort(self._sender(destination, ticket), frames[0])
            except TransferError:
                self._lose_sender(destination, ticket)

        if frames:
            self._run("to", destination, job)

    def receive(
        self,
        source: str,
        move_id: str,
        frames: Sequence[Frame],
        done: Callable[[tuple[CachePiece, ...], str], object],
    ) -> None:
        """Receive what `ship` sends; `done` gets the pieces, or what failed."""
        channel = self._receivers.get(source)
        if channel is None:
            # its transfer thread has just found it broken
            done((), f"the channel from {source} failed before the frames of move {move_id} came")
            return

        def job() -> None:
            asked_s = time.monotonic()
            try:
                pieces, error = _receive_all(channel, source, move_id, frames), ""
            except TransferError as failure:
                self._forget(self._receivers, source, channel)
                pieces, error = (), str(failure)
            except LeaseEnded as end:
                pieces, error = (), str(end)
            if channel.began_s > asked_s:
                self._note("receive", channel.began_s, time.monotonic(), f"{move_id} from {source}")
            done(pieces, error)

        self._run("from", source, job)

    def close_channels(self) -> None:
        """Close what is open; the next move opens its channel anew. Jobs under way end with an error."""
        for peer in list(self._senders):
            self._lose_sender(peer, None)
        for peer in list(self._receivers):
            self._forget(self._receivers, peer)

    def close(self) -> None:
        """Close every channel; jobs under way end with an error."""
        self._transport.close()
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    def _sender(self, destination: str, ticket: Ticket | None) -> Sender:
        found = self._senders.get(destination)
        is_broken = ticket is not None and ticket.channel == self._broken.get(destination)
        if ticket is not None and not is_broken and (found is None or found.ticket.channel != ticket.channel):
            self._forget(self._senders, destination)
            found = _Open(ticket, self._transport.connect(ticket, destination))
            with self._lock:
                self._senders[destination] = found
        if found is None or is_broken:
            raise TransferError(
                peer=destination,
                channel=ticket.channel if ticket else "none",
                awaited="an open channel",
                got="one that failed meanwhile",
                advice="the next move opens a new one",
            )
        return found.end

    def _send_all(self, sender: Sender, move_id: str, frames: Sequence[Frame], lease: Lease) -> str:
        paced = Paced(sender, share=self._settings.transfer_share)
        buffer = np.empty(frame_bytes(max((f.num_bytes for f in frames), default=0)), dtype=np.uint8)
        began_s, sent_bytes, limit = time.monotonic(), 0, self._settings.max_bytes_per_s
        for number, frame in enumerate(frames):
            try:
                with paced.busy():
                    lease.read(frame.part, frame.start, frame.stop, buffer[: frame.num_bytes])
                    sealed = buffer[: frame_bytes(frame.num_bytes)]
                    seal(sealed, sequence_of(move_id, number))
            except LeaseEnded as end:
                self._abort(sender, frame)
                return str(end)
            paced.send(sealed)
            sent_bytes += len(sealed)
            if limit is not None:
                time.sleep(max(0.0, began_s + sent_bytes / limit - time.monotonic()))
        return ""

    def _abort(self, sender: Sender, frame: Frame) -> None:
        buffer = np.zeros(frame_bytes(frame.num_bytes), dtype=np.uint8)
        seal(buffer, ABORTED)
        sender.send(buffer)

    def _note_ticket(self, destination: str, ticket: Ticket | None) -> None:
        if ticket is not None:
            self._known[destination] = ticket.channel

    def _lose_sender(self, destination: str, ticket: Ticket | None) -> None:
        """The channel of the ticket, or the one in use, is of no use any more."""
        found = self._senders.get(destination)
        if ticket is None and found is not None:
            ticket = found.ticket
        if ticket is not None:
            self._broken[destination] = ticket.channel
        if ticket is None or self._known.get(destination) == ticket.channel:
            self._known.pop(destination, None)
        if found is not None and ticket is not None and found.ticket.channel == ticket.channel:
            self._forget(self._senders, destination, found)

    def _forget(self, ends: dict[str, _Open], peer: str, only: _Open | None = None) -> None:
        """Close an end, if it is still `only`: another may have been opened since that one failed."""
        with self._lock:
            found = ends.get(peer)
            if found is None or only not in (None, found):
                return
            del ends[peer]
        found.end.close()

    def _run(self, direction: str, peer: str, job: Callable[[], None]) -> None:
        """Run a job on the thread of a peer and direction; a fault of ours there must not stay unseen."""
        thread = self._thread(direction, peer)
        # an instance that is being closed ships nothing more: its peers' timeouts look after that
        with contextlib.suppress(RuntimeError):
            thread.submit(job).add_done_callback(_log_fault)

    def _thread(self, direction: str, peer: str) -> ThreadPoolExecutor:
        name = (direction, peer)
        if name not in self._threads:
            self._threads[name] = ThreadPoolExecutor(
                max_workers=1,
                thread_name_prefix=f"transfer-{direction}-{peer}",
                # the number of threads is a setting of the calling thread
                initializer=lambda: torch.set_num_threads(1),
            )
        return self._threads[name]


def _log_fault(job: Future) -> None:
    if not job.cancelled() and job.exception() is not None:
        logger.error("a transfer thread failed", exc_info=job.exception())


def sequence_of(move_id: str, number: int) -> int:
    """Number a frame so that those of another move are told apart."""
    return (zlib.crc32(move_id.encode()) << 15) | (number & 0x7FFF)


def _receive_all(
    channel: _Open, source: str, move_id: str, frames: Sequence[Frame]
) -> tuple[CachePiece, ...]:
    pieces: list[CachePiece] = []
    for number, frame in enumerate(frames):
        buffer = np.empty(frame_bytes(frame.num_bytes), dtype=np.uint8)
        channel.end.recv(buffer)
        if number == 0:
            channel.began_s = time.monotonic()
        _require_not_aborted(buffer)
        open_frame(buffer, sequence_of(move_id, number), peer=source, channel=channel.ticket.channel)
        cells = buffer[: frame.num_bytes]
        pieces.append(CachePiece(part=frame.part, start=frame.start, stop=frame.stop, cells=cells))
    return tuple(pieces)


def _require_not_aborted(buffer: np.ndarray) -> None:
    if claimed_sequence(buffer) == ABORTED:
        open_frame(buffer, ABORTED)
        raise LeaseEnded("the source stopped shipping: the sample stays there or has finished")
