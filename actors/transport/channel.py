"""The life of one end of a channel: it works until the first error or until it is closed, never again."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlhfspec.actors.transport.channels import Ticket
from rlhfspec.core.errors import TransferError

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
