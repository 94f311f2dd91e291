"""Planted faults, pacing, choosing a back end, and the error itself. No Ray."""

import pickle
import threading
import time

import numpy as np
import pytest
from in_process import FaultPlan, MemoryHub, MemoryTransport

from rlhfspec.actors.transport.channels import MAX_FRAME_BYTES, Ticket, require_frame
from rlhfspec.actors.transport.frames import frame_bytes, open_frame, seal
from rlhfspec.actors.transport.object_store import ObjectStoreTransport, _Mailbox
from rlhfspec.actors.transport.paced import Paced
from rlhfspec.actors.transport.select import make_transport
from rlhfspec.core.errors import TransferError


def through(faults: FaultPlan, *, frames: int, timeout_s: float = 0.3):
    """Send sealed frames 0, 1, ... through a faulty channel; yields what comes of opening each in turn."""
    hub = MemoryHub()
    source = MemoryTransport(hub, timeout_s=timeout_s, faults=faults)
    receiver, ticket = MemoryTransport(hub, timeout_s=timeout_s).listen("gen-0")
    sender = source.connect(ticket, "gen-1")
    frame = np.empty(frame_bytes(100), dtype=np.uint8)
    for sequence in range(frames):
        frame[:100] = sequence
        seal(frame, sequence)
        sender.send(frame)
    into = np.empty_like(frame)
    opened = []
    for sequence in range(frames):
        receiver.recv(into)
        opened.append(int(open_frame(into, sequence, peer="gen-0", channel=ticket.channel)[0]))
    return opened


def test_without_faults_every_frame_opens():
    assert through(FaultPlan(), frames=3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (FaultPlan(drop=frozenset({1})), "awaited frame 1, got frame 2"),
        (FaultPlan(duplicate=frozenset({0})), "awaited frame 1, got frame 0"),
        (FaultPlan(corrupt=frozenset({2})), "awaited checksum"),
        (FaultPlan(fail=frozenset({1})), "planted at frame 1"),
        (FaultPlan(drop=frozenset({2})), "got nothing"),
    ],
)
def test_planted_faults_are_caught(faults, message):
    with pytest.raises(TransferError, match=message):
        through(faults, frames=3)


def test_a_delay_within_the_timeout_is_waited_for_and_a_longer_one_raises():
    began_s = time.monotonic()
    assert through(FaultPlan(delay_s={1: 0.15}), frames=3) == [0, 1, 2]
    assert time.monotonic() - began_s >= 0.15
    with pytest.raises(TransferError, match="got nothing"):
        through(FaultPlan(delay_s={1: 5.0}), frames=3)


def test_faults_count_frames_over_all_channels_of_a_transport():
    hub = MemoryHub()
    source = MemoryTransport(hub, timeout_s=0.3, faults=FaultPlan(fail=frozenset({1})))
    destination = MemoryTransport(hub, timeout_s=0.3)
    frame = np.ones(10, dtype=np.uint8)
    outcomes = []
    for _ in range(3):
        _, ticket = destination.listen("gen-0")
        sender = source.connect(ticket, "gen-1")
        try:
            sender.send(frame)
            outcomes.append("sent")
        except TransferError:
            outcomes.append("failed")
    assert outcomes == ["sent", "failed", "sent"]


class Recorder:
    """A sender that computes and then waits as long as it is told, on clocks of its own."""

    def __init__(self, *, waits_s: float = 0.0) -> None:
        self.now_s = self.busy_s = 0.0
        self.waits_s = waits_s
        self.slept: list[float] = []
        self.closed = False

    def compute(self, seconds: float) -> None:
        self.now_s += seconds
        self.busy_s += seconds

    def send(self, frame: np.ndarray) -> None:
        self.compute(float(frame[0]))
        self.now_s += self.waits_s

    def close(self) -> None:
        self.closed = True

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def paced_over(recorder: Recorder, share: float) -> Paced:
    return Paced(
        recorder,
        share=share,
        busy_clock=lambda: recorder.busy_s,
        clock=lambda: recorder.now_s,
        sleep=recorder.sleep,
    )


@pytest.mark.parametrize("waits_s", [0.0, 0.1])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.9])
def test_a_paced_sender_is_busy_for_its_share_and_waiting_is_rest(share, waits_s):
    recorder = Recorder(waits_s=waits_s)
    paced = paced_over(recorder, share)
    for seconds in (1, 4, 2):
        with paced.busy():
            recorder.compute(0.5)
        paced.send(np.array([seconds], dtype=np.uint8))
    assert recorder.busy_s == 8.5
    assert recorder.busy_s / recorder.now_s == pytest.approx(share)
    paced.close()
    assert recorder.closed


def test_a_paced_sender_that_has_waited_long_enough_does_not_sleep():
    recorder = Recorder(waits_s=100.0)
    paced_over(recorder, 0.1).send(np.array([3], dtype=np.uint8))
    assert recorder.slept == []


def test_a_share_of_one_never_sleeps_and_a_share_of_zero_is_refused():
    recorder = Recorder()
    paced = paced_over(recorder, 1.0)
    paced.send(np.array([3], dtype=np.uint8))
    assert recorder.slept == []
    for share in (0.0, 1.1):
        with pytest.raises(ValueError, match="share"):
            Paced(recorder, share=share)


@pytest.mark.parametrize(
    "frame",
    [
        np.zeros(4, dtype=np.float32),
        np.zeros((2, 2), dtype=np.uint8),
        np.zeros(8, dtype=np.uint8)[::2],
        np.zeros(0, dtype=np.uint8),
        np.broadcast_to(np.zeros(1, dtype=np.uint8), (MAX_FRAME_BYTES + 1,)),
    ],
    ids=["float32", "matrix", "strided", "empty", "too long"],
)
def test_a_buffer_that_cannot_hold_a_frame_is_refused(frame):
    with pytest.raises(ValueError, match="a frame"):
        require_frame(frame, writable=False)


def test_a_read_only_array_can_be_sent_but_not_filled():
    frame = np.zeros(4, dtype=np.uint8)
    frame.flags.writeable = False
    require_frame(frame, writable=False)
    with pytest.raises(ValueError, match="read-only"):
        require_frame(frame, writable=True)


def test_the_error_survives_pickling_with_its_names():
    error = TransferError(peer="gen-1", channel="ab12", awaited="64 bytes", waited_s=5.04, got="nothing")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and (again.peer, again.channel) == ("gen-1", "ab12")
    assert "gen-1" in str(error) and "ab12" in str(error) and "64 bytes for 5.0 s" in str(error)


def test_a_ticket_of_another_transport_is_refused():
    ticket = Ticket(backend="gloo", channel="c")
    for transport in (MemoryTransport(MemoryHub()), ObjectStoreTransport()):
        with pytest.raises(TransferError, match=f"{transport.name}, got one of gloo"):
            transport.connect(ticket, "gen-1")


def test_auto_is_gloo_here_and_the_object_store_needs_a_handle_to_listen():
    transport = make_transport("auto", host="127.0.0.1", timeout_s=0.5)
    assert transport.name == "gloo"
    transport.close()
    with pytest.raises(TransferError, match="handle"):
        make_transport("object_store", host="127.0.0.1").listen("gen-1")


def test_a_mailbox_gives_frames_in_order_drops_repeated_ones_and_bounds_what_is_unread():
    mailbox = _Mailbox()
    frames = [np.full(1, i, dtype=np.uint8) for i in range(40)]
    assert mailbox.put(1, frames[1]) == "taken"
    threading.Timer(0.05, lambda: mailbox.put(0, frames[0])).start()
    assert mailbox.take(5.0)[0] == 0
    assert mailbox.put(0, frames[9]) == "taken" and mailbox.put(1, frames[9]) == "taken"
    assert mailbox.take(0.0)[0] == 1
    assert [mailbox.put(i, frames[i]) for i in (17, 18)] == ["taken", "full"]
    with pytest.raises(TimeoutError, match="frame 2 is missing"):
        mailbox.take(0.01)
