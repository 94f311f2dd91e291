"""What is particular to gloo pairs: the meeting, what they leave behind, frozen peers. No Ray."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from transport_ends import Ends

from rlhfspec.actors.transport.gloo import GlooTransport
from rlhfspec.actors.transport.rendezvous import PairStore, accept, open_listener, reach
from rlhfspec.actors.transport.select import make_transport
from rlhfspec.core.errors import ConfigError, TransferError

HOST = "127.0.0.1"


@pytest.fixture
def pair():
    """Two transports of this process, and threads for their transfers."""
    ends = [GlooTransport(host=HOST, timeout_s=5.0) for _ in range(2)]
    with ThreadPoolExecutor(max_workers=4) as threads:
        yield *ends, threads
        for end in ends:
            end.close()


def exchange(source, destination, threads, size=1000):
    """One frame over a new channel; both ends of it, still open."""
    receiver, ticket = destination.listen("source")
    into = np.zeros(size, dtype=np.uint8)
    receiving = threads.submit(receiver.recv, into)
    sender = source.connect(ticket, "destination")
    sender.send(np.full(size, 7, dtype=np.uint8))
    receiving.result(timeout=10)
    assert (into == 7).all()
    return sender, receiver


def footprint() -> tuple[int, int]:
    return Ends(None).footprint()


def settled(expected: tuple[int, int]) -> tuple[int, int]:
    """The footprint, once it is no larger than expected or has had time to become so."""
    ends_s = time.monotonic() + 3.0
    while (now := footprint()) > expected and time.monotonic() < ends_s:
        time.sleep(0.02)
    return now


def steady() -> tuple[int, int]:
    """The footprint, once it has not changed for a while: an earlier test's sockets may still be closing."""
    before, unchanged = footprint(), 0
    while unchanged < 20:
        time.sleep(0.05)
        now = footprint()
        before, unchanged = now, unchanged + 1 if now == before else 0
    return before


def test_channels_and_transports_leave_no_thread_and_no_socket_behind():
    with ThreadPoolExecutor(max_workers=1) as threads:
        threads.submit(int).result()
        before = steady()
        source, destination = (GlooTransport(host=HOST, timeout_s=5.0) for _ in range(2))
        for end in exchange(source, destination, threads):
            end.close()
        with_devices = footprint()
        for _ in range(10):
            for end in exchange(source, destination, threads):
                end.close()
        assert settled(with_devices) <= with_devices
        _, unused = destination.listen("source")
        exchange(source, destination, threads)
        destination.close()
        source.close()
        assert settled(before) == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, unused.port), timeout=1.0)


def test_a_failed_channel_leaves_nothing_behind(pair):
    source, destination, threads = pair
    for end in exchange(source, destination, threads):
        end.close()
    before = settled(footprint())
    sender, receiver = exchange(source, destination, threads)
    sender.close()
    with pytest.raises(TransferError):
        receiver.recv(np.zeros(10, dtype=np.uint8))
    assert settled(before)[1] <= before[1]


def test_closing_while_another_thread_waits_ends_the_wait_at_its_timeout():
    source, destination = (GlooTransport(host=HOST, timeout_s=0.6) for _ in range(2))
    with ThreadPoolExecutor(max_workers=2) as threads:
        _, receiver = exchange(source, destination, threads)
        waiting = threads.submit(receiver.recv, np.zeros(10, dtype=np.uint8))
        time.sleep(0.1)
        receiver.close()
        with pytest.raises(TransferError, match="got Timed out waiting"):
            waiting.result(timeout=5)
    source.close(), destination.close()


def test_waiting_for_a_source_releases_the_interpreter_and_ends_with_close():
    destination = GlooTransport(host=HOST, timeout_s=60.0)
    with ThreadPoolExecutor(max_workers=1) as threads:
        waiting, _ = destination.listen("nobody")
        opening = threads.submit(waiting.recv, np.zeros(10, dtype=np.uint8))
        count = 0
        while count < 1_000_000:
            count += 1
        assert not opening.done(), "this thread stood still until the wait had run out"
        waiting.close()
        with pytest.raises(TransferError, match="nobody") as caught:
            opening.result(timeout=120)
        assert "timed out" not in str(caught.value).lower(), "it ended with its own limit, not with close"
    destination.close()


def test_an_address_of_another_node_is_refused():
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7"):
        GlooTransport(host="203.0.113.7")
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7"):
        make_transport("auto", host="203.0.113.7")


def test_a_listener_is_bound_to_the_given_address_only(pair):
    _, destination, _ = pair
    _, ticket = destination.listen("source")
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", ticket.port), timeout=1.0)
    socket.create_connection((HOST, ticket.port), timeout=1.0).close()


def test_a_connection_without_the_channels_token_is_rejected():
    listener = open_listener(HOST)
    port = listener.getsockname()[1]
    with ThreadPoolExecutor(max_workers=1) as threads:
        accepting = threads.submit(accept, listener, "abcd", 5.0)
        socket.create_connection((HOST, port)).close()
        stranger = socket.create_connection((HOST, port))
        stranger.sendall(b"GET / HTTP/1.1\r\n")
        silent = socket.create_connection((HOST, port))  # must not keep the source out
        store = PairStore(reach(HOST, port, "abcd", 5.0), timeout_s=0.3)
        other = PairStore(accepting.result(timeout=5), timeout_s=0.3)
    store.set("a/0", b"x" * 1000)
    assert other.get("a/0") == b"x" * 1000 and other.check(["a/0"]) and not other.check(["a/1"])
    with pytest.raises(TimeoutError):
        store.wait(["a/1"])
    store.close()
    with pytest.raises(ConnectionError, match="closed by the peer"):
        other.get("a/1")
    stranger.close(), silent.close(), other.close(), listener.close()


FROZEN_RECEIVER = """
import sys, numpy as np
from rlhfspec.actors.transport.gloo import GlooTransport
transport = GlooTransport(host="127.0.0.1", timeout_s=30.0)
receiver, ticket = transport.listen("source")
print(ticket.channel, ticket.port, flush=True)
while True:
    receiver.recv(np.empty(1 << 20, dtype=np.uint8))
"""


def test_a_frozen_destination_raises_at_the_timeout():
    from rlhfspec.actors.transport.channels import Ticket

    root = str(Path(__file__).resolve().parents[3])
    process = subprocess.Popen(
        [sys.executable, "-c", FROZEN_RECEIVER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    source = GlooTransport(host=HOST, timeout_s=1.0)
    try:
        assert process.stdout is not None
        channel, port = process.stdout.readline().split()
        ticket = Ticket(backend="gloo", channel=channel, host=HOST, port=int(port))
        sender = source.connect(ticket, "frozen")
        frame = np.zeros(1 << 20, dtype=np.uint8)
        sender.send(frame)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TransferError, match=r"Timed out waiting \d+ms for send") as caught:
            for _ in range(20):
                sender.send(frame)
        assert caught.value.peer == "frozen"
        with pytest.raises(TransferError, match="dead channel"):
            sender.send(frame)
    finally:
        process.kill()
        process.wait()
        source.close()
