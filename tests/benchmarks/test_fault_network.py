"""A cut connection is silent and then goes on; a reset one is gone. Between this process and a child."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from rlhfspec.benchmarks.faulty import network

if (reason := network.why_not()) is not None:
    pytest.skip(f"no handle on another process's socket here: {reason}", allow_module_level=True)

ECHO = "import socket; link = socket.socket(fileno=0)\nwhile data := link.recv(9): link.sendall(data)"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """A connection to a child that echoes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    with ours, subprocess.Popen([sys.executable, "-c", ECHO], stdin=theirs.fileno()) as child:
        theirs.close()
        ours.settimeout(60.0)
        ours.sendall(b"begun")
        assert ours.recv(9) == b"begun"
        yield ours, child
        child.kill()


def test_what_is_sent_during_a_cut_arrives_after_it(pair) -> None:
    ours, child = pair
    heals, is_cut = threading.Event(), threading.Event()

    def goes_on() -> bool:
        is_cut.set() if looks else looks.append(1)
        return not heals.is_set()

    looks: list[int] = []
    cutting = threading.Thread(target=network.cut, args=(os.getpid(), child.pid, 120.0, goes_on))
    cutting.start()
    assert is_cut.wait(60.0)
    ours.sendall(b"word")
    ours.settimeout(1.0)
    with pytest.raises(TimeoutError):
        ours.recv(9)
    heals.set()
    cutting.join()
    ours.settimeout(60.0)
    assert ours.recv(9) == b"word"


def test_a_reset_ends_the_connection_on_both_sides(pair) -> None:
    ours, child = pair
    assert network.are_connected(os.getpid(), child.pid)
    assert network.reset(os.getpid(), child.pid) == 1
    assert ours.recv(9) == b"" and child.wait(timeout=60.0) is not None
    assert not network.are_connected(os.getpid(), child.pid)


def test_both_families_of_addresses_are_read_alike() -> None:
    head = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    )
    four = "   0: 0100007F:9259 0100007F:95BC 01 00000000:00000000 00:00000000 00000000     0        0 71 1\n"
    mapped = (
        "   0: 0000000000000000FFFF00000100007F:95BC 0000000000000000FFFF00000100007F:9259 01 "
        "00000000:00000000 00:00000000 00000000     0        0 72 1\n"
    )
    waiting = four.replace(" 01 ", " 0A ").replace("71 1", "73 1")
    one = network.established(head + four + waiting)
    assert one == {"71": ("0100007F:9259", "0100007F:95BC")}
    assert network.established(head + mapped)["72"] == one["71"][::-1]
