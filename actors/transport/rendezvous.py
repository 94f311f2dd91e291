"""Where the two ends of a process group meet: one TCP connection, from the source to the destination.

A process group wants a store to exchange addresses through. torch's TCPStore looks up the name of every
address it sees in the DNS, which held up each opening by 5 s where nobody answered, listens on all
addresses and keeps a thread; this one does none of that. Every wait ends at its timeout.
"""

from __future__ import annotations

import hmac
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed

LENGTHS = struct.Struct("<II")
MAX_ITEM_BYTES = 1 << 20
_KNOCK_S = 1.0
"Within which whoever connects must show the channel's id: strangers who say nothing must not keep the source out."
_c10d: Any = torch.distributed


def open_listener(host: str) -> socket.socket:
    """Listen on a free port of one address of this node. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=4)


def close_listener(listener: socket.socket) -> None:
    """Free the port; an `accept` under way ends at once."""
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def accept(listener: socket.socket, channel: str, timeout_s: float) -> socket.socket:
    """Wait for the source of `channel` to knock. Raises OSError."""
    ends_s = time.monotonic() + timeout_s
    while True:
        listener.settimeout(remaining_s(ends_s))
        link, _ = listener.accept()
        link.settimeout(min(remaining_s(ends_s), _KNOCK_S))
        with suppress(ConnectionError, TimeoutError):
            if hmac.compare_digest(read_exactly(link, len(channel)), channel.encode()):
                return link
        # Somebody else found the port.
        link.close()


def reach(host: str, port: int, channel: str, timeout_s: float) -> socket.socket:
    """Connect to the destination's listener. Raises OSError."""
    link = socket.create_connection((host, port), timeout=timeout_s)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.sendall(channel.encode())
    return link


class PairStore(_c10d.Store):
    """The store of one pair: what either side sets, both can get. Used by one thread at a time.

    What the groups do not call raises torch's own error for a method that is missing.
    """

    def __init__(self, link: socket.socket, *, timeout_s: float) -> None:
        super().__init__()
        self._link = link
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Keep a value and send it to the other side. Raises OSError."""
        name, data = key.encode(), value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        self._link.settimeout(self._timeout_s)
        self._link.sendall(LENGTHS.pack(len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it. Raises OSError."""
        self.wait([key])
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether the values are here."""
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until the values are here. Raises OSError, TimeoutError among them."""
        ends_s = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            self._link.settimeout(remaining_s(ends_s))
            name_length, data_length = LENGTHS.unpack(read_exactly(self._link, LENGTHS.size))
            if name_length + data_length > MAX_ITEM_BYTES:
                raise ConnectionError("a peer that speaks another protocol")
            name = read_exactly(self._link, name_length)
            # bytes that are no name are awaited by nobody
            self._values[name.decode(errors="replace")] = read_exactly(self._link, data_length)

    def close(self) -> None:
        """Close the connection."""
        self._link.close()


def read_exactly(link: socket.socket, length: int) -> bytes:
    """Read so many bytes. Raises OSError."""
    data = bytearray()
    while len(data) < length:
        part = link.recv(length - len(data))
        if not part:
            raise ConnectionError("a connection closed by the peer")
        data += part
    return bytes(data)


def remaining_s(ends_s: float) -> float:
    """Seconds until a moment of the monotonic clock. Raises TimeoutError when it is over."""
    remaining_s = ends_s - time.monotonic()
    if remaining_s <= 0.0:
        raise TimeoutError("nobody in time")
    return remaining_s


_c10d: Any = torch.distributed
_DONE = "done"


class StarStore(_c10d.Store):
    """One end: rank 0 has a link to each other rank, those have one to it. Used by one thread at a time.

    Rank 0 hands on while it waits itself; `finish` is to be called on all ends.
    """

    def __init__(self, links: Sequence[socket.socket], *, is_hub: bool, timeout_s: float) -> None:
        super().__init__()
        self._links = list(links)
        self._is_hub = is_hub
        self._ends_s = time.monotonic() + timeout_s
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Keep a value and send it to all. Raises OSError."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        self._send(key, data)

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it. Raises OSError."""
        self.wait([key])
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether the values are here."""
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until the values are here. Raises OSError, TimeoutError among them."""
        ends_s = self._ends_s if timeout is None else time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            self._take_one(ends_s)

    def finish(self) -> None:
        """Say that this end has what it needs; rank 0 hands on until all have said so. Raises OSError."""
        try:
            if not self._is_hub:
                self.set(_DONE, b"")
            while self._is_hub and self._links:
                self._take_one(self._ends_s)
        finally:
            self.close()

    def close(self) -> None:
        """Close the connections."""
        for link in self._links:
            link.close()
        self._links = []

    def _take_one(self, ends_s: float) -> None:
        ready, _, _ = select.select(self._links, [], [], remaining_s(ends_s))
        if not ready:
            raise TimeoutError("nobody in time")
        link = ready[0]
        link.settimeout(remaining_s(ends_s))
        name_length, data_length = LENGTHS.unpack(read_exactly(link, LENGTHS.size))
        if name_length + data_length > MAX_ITEM_BYTES:
            raise ConnectionError("a member that speaks another protocol")
        name = read_exactly(link, name_length).decode()
        data = read_exactly(link, data_length)
        if name == _DONE:
            self._links.remove(link)
            link.close()
            return
        self._values[name] = data
        if self._is_hub:
            self._send(name, data, leave_out=link)

    def _send(self, key: str, data: bytes, leave_out: socket.socket | None = None) -> None:
        name = key.encode()
        for link in self._links:
            if link is not leave_out:
                link.settimeout(remaining_s(self._ends_s))
                link.sendall(LENGTHS.pack(len(name), len(data)) + name + data)
