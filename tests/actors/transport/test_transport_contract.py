"""What every transport promises, one set of tests over all back ends."""

import re
import time

import pytest
from in_process import MemoryHub
from transport_ends import PATIENT_S, TIMEOUT_S, ActorEnd, LocalEnd

from rlhfspec.core.errors import TransferError

ANSWER_S = 60.0
"Longest wait of a test for a call; far above every timeout of the transports."


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def backends():
    two_gpus = pytest.mark.skipif(gpus() < 2, reason="not run: needs two GPUs")
    yield pytest.param("memory", id="memory")
    yield pytest.param("gloo", id="gloo", marks=pytest.mark.ray)
    yield pytest.param("object_store", id="object_store", marks=pytest.mark.ray)
    yield pytest.param("nccl", id="nccl", marks=[pytest.mark.ray, pytest.mark.gpu, two_gpus])


class Bench:
    """Instances of one back end, started when first named; those killed are replaced for the next test."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._hub = MemoryHub()
        self._ends = {}

    def __getitem__(self, name: str):
        if name not in self._ends:
            self.start(name)
        return self._ends[name]

    def start(self, *names: str) -> None:
        """Start instances; with torch that takes longer than the timeouts of those who would wait for them."""
        for name in names:
            # An actor that loads torch costs seconds; two processes are enough for gloo.
            is_local = self.backend == "memory" or (self.backend == "gloo" and name in ("a", "c", "hasty"))
            timeout_s = TIMEOUT_S if name == "hasty" else PATIENT_S
            self._ends[name] = (
                LocalEnd(self.backend, self._hub, timeout_s)
                if is_local
                else ActorEnd(self.backend, timeout_s)
            )
        for started in [self._ends[name].call("footprint") for name in names]:
            answer(started)

    def kill(self, name: str) -> None:
        self._ends.pop(name).kill()

    def close(self) -> None:
        for end in self._ends.values():
            end.kill()

    def open(self, source: str, destination: str):
        """A listening channel and the pending connection to it; gloo joins in the first `recv`."""
        ticket = answer(self[destination].call("listen", source))
        return ticket, self[source].call("connect", ticket, destination)

    def transfer(self, source: str, destination: str, frames, *, ticket=None):
        """Futures of both sides; a new channel unless a ticket of an open one is given."""
        if ticket is not None:
            return (
                ticket,
                self[destination].call("recv", ticket, frames),
                self[source].call("send", ticket, frames),
            )
        ticket, connecting = self.open(source, destination)
        receiving = self[destination].call("recv", ticket, frames)
        answer(connecting)
        return ticket, receiving, self[source].call("send", ticket, frames)


@pytest.fixture(scope="module", params=list(backends()))
def bench(request):
    if request.param != "memory":
        request.getfixturevalue("local_ray")
    made = Bench(request.param)
    made.start("a", "b", "c", "hasty")
    yield made
    made.close()


def answer(future):
    return future.result(timeout=ANSWER_S)


def failure(future) -> TransferError:
    """The error that a call ends with."""
    with pytest.raises(TransferError) as caught:
        answer(future)
    return getattr(caught.value, "cause", caught.value)


def ran_out(error: TransferError, limit_s: float = TIMEOUT_S) -> bool:
    """True when the error says that a wait took its whole limit."""
    told = re.search(r" for ([\d.]+) s, got ", str(error))
    return told is not None and float(told[1]) >= limit_s


def test_frames_arrive_unchanged_and_in_order(bench):
    sizes = [1, 7, 4096, 65536 + 3, 1 << 20, 8 << 20, 8 << 20, 2, 1]
    _, receiving, sending = bench.transfer("a", "b", list(enumerate(sizes)))
    answer(sending)
    assert answer(receiving) == [True] * len(sizes)


def test_a_channel_lasts_and_takes_frames_after_a_pause(bench):
    ticket, receiving, sending = bench.transfer("a", "b", [(1, 1000)])
    assert answer(receiving) == [True] and answer(sending) is None
    time.sleep(0.3)
    _, receiving, sending = bench.transfer("a", "b", [(2, 5000)] * 20, ticket=ticket)
    assert answer(receiving) == [True] * 20 and answer(sending) is None


def test_what_was_sent_before_the_sender_closed_is_received(bench):
    frames = [(i, 300_000) for i in range(4)]
    ticket, receiving, sending = bench.transfer("a", "b", frames)
    answer(sending)
    answer(bench["a"].call("close_channel", ticket))
    assert answer(receiving) == [True] * 4
    error = failure(bench["b"].call("recv", ticket, [(9, 10)]))
    assert not ran_out(error) and error.peer == "a"


def test_opposite_directions_at_once_do_not_deadlock(bench):
    frames = [(i, 1 << 20) for i in range(8)]
    there, there_opening = bench.open("a", "b")
    back, back_opening = bench.open("b", "a")
    received = [bench["b"].call("recv", there, frames), bench["a"].call("recv", back, frames)]
    answer(there_opening), answer(back_opening)
    sent = [bench["a"].call("send", there, frames), bench["b"].call("send", back, frames)]
    assert [answer(f) for f in received] == [[True] * 8] * 2
    assert [answer(f) for f in sent] == [None] * 2


def test_all_pairs_of_three_instances_can_transfer_at_once(bench):
    names = ["a", "b", "c"]
    pairs = [(s, d) for s in names for d in names if s != d]
    frames = {pair: [(10 * i + j, 200_000) for j in range(3)] for i, pair in enumerate(pairs)}
    opened = {pair: bench.open(*pair) for pair in pairs}
    received = {(s, d): bench[d].call("recv", opened[s, d][0], frames[s, d]) for s, d in pairs}
    for _, opening in opened.values():
        answer(opening)
    sent = [bench[s].call("send", opened[s, d][0], frames[s, d]) for s, d in pairs]
    assert all(answer(future) == [True] * 3 for future in received.values())
    assert all(answer(future) is None for future in sent)


def test_a_source_that_never_connects_is_named_at_the_timeout(bench):
    ticket = answer(bench["hasty"].call("listen", "a"))
    error = failure(bench["hasty"].call("recv", ticket, [(0, 64)]))
    assert ran_out(error)
    assert error.peer == "a" and error.channel == ticket.channel
    assert "64 bytes from a" in str(error) and f"{TIMEOUT_S:.1f} s" in str(error)


def test_a_silent_source_is_named_at_the_timeout_and_its_channel_stays_dead(bench):
    ticket, receiving, sending = bench.transfer("a", "hasty", [(0, 64)])
    answer(receiving), answer(sending)
    error = failure(bench["hasty"].call("recv", ticket, [(1, 64)]))
    assert ran_out(error) and error.peer == "a"
    error = failure(bench["hasty"].call("recv", ticket, [(1, 64)]))
    assert not ran_out(error) and "dead channel" in str(error)


def test_a_destination_that_reads_nothing_is_named_at_the_timeout(bench):
    ticket, receiving, sending = bench.transfer("hasty", "b", [(0, 64)])
    answer(receiving), answer(sending)
    error = failure(bench["hasty"].call("send", ticket, [(1, 64)] * 40))
    assert ran_out(error) and error.peer == "b" and "b to take 64 bytes" in str(error)
    error = failure(bench["hasty"].call("send", ticket, [(1, 64)]))
    assert not ran_out(error) and "dead channel" in str(error)


def test_a_frame_of_another_length_is_refused(bench):
    for sent, expected in ((100, 200), (200, 100)):
        ticket, connecting = bench.open("a", "hasty")
        receiving = bench["hasty"].call("recv", ticket, [(0, expected)])
        answer(connecting)
        bench["a"].call("send", ticket, [(0, sent)])
        error = failure(receiving)
        assert f"{expected} bytes from a" in str(error)


def test_a_killed_destination_raises_and_harms_no_other_channel(bench):
    kept, receiving, sending = bench.transfer("a", "b", [(0, 1000)])
    answer(receiving), answer(sending)
    doomed, receiving, sending = bench.transfer("a", "doomed", [(0, 1000)])
    answer(receiving), answer(sending)
    stuck = bench["a"].call("send", doomed, [(i, 1 << 20) for i in range(40)], 0.05)
    time.sleep(0.2)
    bench.kill("doomed")
    assert failure(stuck).peer == "doomed"
    _, receiving, sending = bench.transfer("a", "b", [(1, 500_000)], ticket=kept)
    assert answer(receiving) == [True] and answer(sending) is None
    _, receiving, sending = bench.transfer("a", "doomed", [(2, 500_000)])
    assert answer(receiving) == [True] and answer(sending) is None


def test_a_killed_source_raises_and_harms_no_other_channel(bench):
    # Gloo and memory see it at once; in the object store nothing of the source connects to here.
    runs_out = bench.backend == "object_store"
    name, limit_s = ("hasty", TIMEOUT_S) if runs_out else ("c", PATIENT_S)
    kept, receiving, sending = bench.transfer("a", name, [(0, 1000)])
    answer(receiving), answer(sending)
    doomed, receiving, sending = bench.transfer("doomed", name, [(0, 1000)])
    answer(receiving), answer(sending)
    stuck = bench[name].call("recv", doomed, [(1, 1000)])
    time.sleep(0.2)
    bench.kill("doomed")
    error = failure(stuck)
    assert error.peer == "doomed" and ran_out(error, limit_s) == runs_out
    _, receiving, sending = bench.transfer("a", name, [(1, 500_000)], ticket=kept)
    assert answer(receiving) == [True] and answer(sending) is None


def test_close_is_idempotent_and_final(bench):
    ticket, receiving, sending = bench.transfer("a", "b", [(0, 64)])
    answer(receiving), answer(sending)
    for name in ("a", "b", "a", "b"):
        answer(bench[name].call("close_channel", ticket))
    error = failure(bench["a"].call("send", ticket, [(0, 64)]))
    assert "closed on this side" in str(error)
    error = failure(bench["b"].call("recv", ticket, [(0, 64)]))
    assert "closed on this side" in str(error)


def test_a_closed_transport_opens_nothing_and_ends_its_channels(bench):
    ticket, receiving, sending = bench.transfer("c", "b", [(0, 64)])
    answer(receiving), answer(sending)
    waiting = bench["b"].call("recv", ticket, [(0, 64)])
    answer(bench["c"].call("close"))
    answer(bench["c"].call("close"))
    error = failure(waiting)
    assert error.peer == "c" and not ran_out(error)
    failure(bench["c"].call("send", ticket, [(0, 64)]))
    late = answer(bench["b"].call("listen", "c"))
    failure(bench["c"].call("connect", late, "b"))
