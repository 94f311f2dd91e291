"""Sockets between the ranks of a group, one of each pair, in a folder that is only this user's."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from ..cache.shared_memory import SharedFile

_TRIES = 400
"Before a rank that waits goes to sleep: to be woken takes longer than the others' share of a sum."
_RETRY_S = 0.02
"Between two looks for a rank that does not listen yet."
_WATCH_S = 1.0


class Peer:
    """The way to another rank. What fails raises OSError: TimeoutError where it says nothing, else it has ended."""

    def __init__(self, way: socket.socket) -> None:
        way.setblocking(False)
        self._way = way

    def close(self) -> None:
        """End it; the other rank sees that."""
        self._way.close()

    def send(self, data: bytes | memoryview, timeout_s: float) -> None:
        """Send all of it."""
        left = memoryview(data)
        while left:
            try:
                left = left[self._way.send(left) :]
            except BlockingIOError:
                self._sleep(select.POLLOUT, timeout_s)

    def give(self, file: SharedFile, timeout_s: float) -> None:
        """Send a file's descriptor."""
        self._way.setblocking(True)
        self._way.settimeout(timeout_s)
        socket.send_fds(self._way, [b"."], [file.descriptor])
        self._way.setblocking(False)

    def taken(self, timeout_s: float) -> SharedFile:
        """Receive a file's descriptor."""
        self._sleep(select.POLLIN, timeout_s)
        _, descriptors, _, _ = socket.recv_fds(self._way, 1, 1)
        if not descriptors:
            raise ConnectionError("it has ended")
        return SharedFile(descriptors[0])

    def fill(self, into: bytearray | memoryview, timeout_s: float | None) -> None:
        """Fill it with what the other rank sends; None: for as long as it takes."""
        left, tries = memoryview(into), _TRIES
        while left:
            try:
                count = self._way.recv_into(left)
            except BlockingIOError:
                tries -= 1
                if tries > 0:
                    os.sched_yield()
                else:
                    self._sleep(select.POLLIN, timeout_s)
                continue
            if count == 0:
                raise ConnectionError("it has ended")
            left = left[count:]

    def _sleep(self, until: int, timeout_s: float | None) -> None:
        ready = select.poll()
        ready.register(self._way, until)
        if not ready.poll(None if timeout_s is None else 1000.0 * timeout_s):
            raise TimeoutError(f"nothing within {timeout_s:g} s")


def meet_peers(
    folder: Path, rank: int, num_ranks: int, *, timeout_s: float, watch: Callable[[], None]
) -> dict[int, Peer]:
    """Return the ways to all other ranks.

    `watch` is called about every second until all have come. Raises TimeoutError: not all came in time; what it raises.
    """
    ends_s = time.monotonic() + timeout_s
    with ExitStack() as until_met:
        # a path through a descriptor: that of a socket has room for about 100 bytes
        opened = os.open(folder, os.O_RDONLY)
        until_met.callback(os.close, opened)
        place = f"/proc/self/fd/{opened}"
        listening = until_met.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(f"{place}/{rank}")
        listening.listen(num_ranks)
        ways = [_reached(f"{place}/{other}", rank, ends_s) for other in range(rank)]
        higher: dict[int, socket.socket] = {}
        while len(higher) < num_ranks - rank - 1:
            watch()
            listening.settimeout(min(max(ends_s - time.monotonic(), _RETRY_S), _WATCH_S))
            try:
                way, _ = listening.accept()
            except TimeoutError:
                if time.monotonic() > ends_s:
                    raise
                continue
            way.settimeout(timeout_s)
            if not (said := way.recv(1)):
                raise ConnectionError("a rank ended before all had met")
            higher[said[0]] = way
    ways += [higher[other] for other in sorted(higher)]
    others = [other for other in range(num_ranks) if other != rank]
    return {other: Peer(way) for other, way in zip(others, ways, strict=True)}


def _reached(place: str, rank: int, ends_s: float) -> socket.socket:
    """Connect to a rank, which may not be there yet."""
    while True:
        way = socket.socket(socket.AF_UNIX)
        way.settimeout(max(ends_s - time.monotonic(), _RETRY_S))
        with suppress(FileNotFoundError, ConnectionRefusedError):
            way.connect(place)
            way.sendall(bytes([rank]))
            return way
        way.close()
        if time.monotonic() > ends_s:
            raise TimeoutError("timed out")
        time.sleep(_RETRY_S)
