"""Cuts the network between two processes of this machine, without a firewall and without the processes' help.

The kernel gives a second handle on a socket of another process (`pidfd_getfd`, as debuggers use it). A socket filter
that lets nothing through is put on both ends of every TCP connection of the two: what arrives is dropped in silence,
as on a broken line, until the filter is taken away; then TCP sends again. A reset shuts the connections down instead,
as a firewall does that has forgotten them. A connection that is made during a cut is found at the next look.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from ...core.proc_files import PROC

_PIDFD_GETFD = 438
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"One instruction of a classic socket filter: let 0 bytes through."
_ESTABLISHED = "01"
_LOOK_S = 0.2
Ends = tuple[str, str]
"Own address and port, and the peer's, as the kernel prints them, without the prefix of mapped addresses."


def cut(one: int, other: int, seconds: float, goes_on: Callable[[], bool]) -> int:
    """Drop all that two processes send each other by TCP, for so many seconds; the number of connections."""
    held: dict[tuple[int, Ends], socket.socket] = {}
    ends_s = time.monotonic() + seconds
    with ExitStack() as stack:
        try:
            while goes_on() and time.monotonic() < ends_s:
                for key, fd in _shared(one, other).items():
                    if key not in held:
                        with suppress(OSError):
                            held[key] = stack.enter_context(_handle(key[0], fd))
                            _drop(held[key])
                time.sleep(_LOOK_S)
        finally:
            for handle in held.values():
                with suppress(OSError):
                    handle.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
    return len(held) // 2


def reset(one: int, other: int) -> int:
    """Shut down every TCP connection between two processes; their number."""
    found = _shared(one, other)
    for (pid, _), fd in found.items():
        with suppress(OSError), _handle(pid, fd) as handle:
            handle.shutdown(socket.SHUT_RDWR)
    return len(found) // 2


def are_connected(one: int, other: int) -> bool:
    """Whether there is a TCP connection between two processes."""
    return bool(_shared(one, other))


def why_not() -> str | None:
    """Why the network cannot be cut here, or None where it can: tried on a socket that a child of ours has."""
    with socket.socket() as probe, subprocess.Popen(["sleep", "60"], stdin=probe.fileno()) as child:
        try:
            with _handle(child.pid, 0) as handle:
                _drop(handle)
        except (OSError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            child.kill()
    return None


def _drop(handle: socket.socket) -> None:
    program = ctypes.create_string_buffer(_DROP_ALL)
    handle.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


@contextmanager
def _handle(pid: int, fd: int) -> Iterator[socket.socket]:
    """A handle of our own on another process's socket. Raises OSError."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        ours = libc.syscall(_PIDFD_GETFD, process, fd, 0)
        if ours < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(process)
    with socket.socket(fileno=ours) as handle:
        yield handle


def _shared(one: int, other: int) -> dict[tuple[int, Ends], int]:
    """Both ends of every connection of two processes: file descriptors by process and ends."""
    by_inode = {}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            by_inode |= established((PROC / "net" / table).read_text())
    mine, theirs = (
        {by_inode[inode]: fd for inode, fd in _sockets(pid).items() if inode in by_inode}
        for pid in (one, other)
    )
    found = {}
    for ends, fd in mine.items():
        if ends[::-1] in theirs:
            found[one, ends] = fd
            found[other, ends[::-1]] = theirs[ends[::-1]]
    return found


def established(table: str) -> dict[str, Ends]:
    """Ends by inode of the connections in the text of /proc/net/tcp or tcp6."""
    found = {}
    for line in table.splitlines()[1:]:
        fields = line.split()
        if fields[3] == _ESTABLISHED:
            found[fields[9]] = (_bare(fields[1]), _bare(fields[2]))
    return found


def _bare(address: str) -> str:
    """Without what tcp6 puts before an address of the older protocol."""
    host, _, port = address.partition(":")
    return f"{host.removeprefix('0000000000000000FFFF0000')}:{port}"


def _sockets(pid: int) -> dict[str, int]:
    """File descriptors of a process's sockets by inode."""
    found = {}
    with suppress(OSError):
        for entry in os.listdir(PROC / str(pid) / "fd"):
            with suppress(OSError):
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(PROC / str(pid) / "fd" / entry))
                if match:
                    found[match[1]] = int(entry)
    return found
