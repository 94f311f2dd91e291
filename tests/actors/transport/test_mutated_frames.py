"""Whatever bytes arrive where a peer's are awaited: what was sent, or one clear error; never other bytes."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import changed_bytes, examples

from rlhfspec.actors.transport.channels import new_channel_id
from rlhfspec.actors.transport.frames import frame_bytes, open_frame, seal
from rlhfspec.actors.transport.rendezvous import LENGTHS, PairStore, accept, close_listener, open_listener
from rlhfspec.core.errors import TransferError

ROW = 8 * 512
"Bytes that the checksum takes as one row."


def sealed(payload: bytes, sequence: int) -> bytes:
    frame = np.empty(frame_bytes(len(payload)), dtype=np.uint8)
    frame[: len(payload)] = np.frombuffer(payload, dtype=np.uint8)
    seal(frame, sequence)
    return frame.tobytes()


@st.composite
def changed_frames(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A payload of a few rows and a rest, and its sealed frame with pieces changed, swapped or cut."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    payload = rng.integers(
        0, 256, draw(st.sampled_from([0, 1, 24, 100, ROW, 3 * ROW + 5])), np.uint8
    ).tobytes()
    return payload, draw(changed_bytes(sealed(payload, 7), fragments=False))


@examples(0.2)
@given(pair=changed_frames())
def test_a_frame_that_opens_holds_what_was_sent(pair: tuple[bytes, bytes]) -> None:
    payload, frame = pair
    try:
        opened = open_frame(np.frombuffer(frame, dtype=np.uint8), 7)
    except TransferError as error:
        assert str(error).isprintable()
        return
    assert opened.tobytes() == payload


def item(name: bytes, data: bytes) -> bytes:
    return LENGTHS.pack(len(name), len(data)) + name + data


STREAMS = st.one_of(
    changed_bytes(item(b"other", b"x" * 30) + item(b"key", b"value"), fragments=False),
    st.builds(item, st.binary(max_size=9), st.binary(max_size=9)),
    st.builds(struct.pack, st.just("<II"), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
)


@examples(0.1)
@given(stream=STREAMS)
def test_an_exchange_of_addresses_ends_with_a_value_or_an_os_error(stream: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(stream)
        there.close()
        store = PairStore(here, timeout_s=60.0)
        try:
            assert isinstance(store.get("key"), bytes)
        except OSError as error:
            assert not isinstance(error, TimeoutError)


@pytest.mark.parametrize("seed", range(3))
def test_strangers_who_send_anything_are_not_let_in_and_do_not_keep_the_source_out(seed: int) -> None:
    channel = new_channel_id()
    listener = open_listener("127.0.0.1")
    address = listener.getsockname()[:2]
    rng = np.random.default_rng(seed)
    near = channel[:-1] + ("0" if channel[-1] != "0" else "1")
    knocks = [rng.bytes(size) for size in (0, 1, len(channel), 5000)] + [near.encode(), channel[:-1].encode()]
    let_in: list[socket.socket] = []
    waiter = threading.Thread(target=lambda: let_in.append(accept(listener, channel, 120.0)), daemon=True)
    waiter.start()
    for knock in knocks:
        with socket.create_connection(address) as stranger, suppress(OSError):
            stranger.sendall(knock)
    source = socket.create_connection(address)
    source.sendall(channel.encode())
    waiter.join(timeout=120.0)
    assert [link.getpeername() for link in let_in] == [source.getsockname()]
    for link in (*let_in, source):
        link.close()
    close_listener(listener)
