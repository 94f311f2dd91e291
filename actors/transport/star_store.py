"""Where more than two ends of a process group meet: every member has one connection, to rank 0, which hands on.

As `actors.transport.rendezvous.PairStore` and for its reasons; used until the group stands, then closed.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from rlhfspec.actors.transport.rendezvous import LENGTHS, MAX_ITEM_BYTES, read_exactly, remaining_s

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
