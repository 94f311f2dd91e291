"""Seconds at the port: whatever the decode thread gives to moves is counted, and published with the load."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import pytest
from fake_engine import FakeEngine, FakeHost, make_request

from actors.generation.decode_loop import DecodeLoop, NewsOrder, SubmitOrder
from actors.generation.migration_port import MigrationPort, TimedPort
from core.errors import RlhfSpecError
from core.records import Completion, GenerationStats, InstanceLoad, SampleKey
from engine.exchange import CachePiece
from policies.migration.move_messages import Landed, News


class SlowPort:
    """Every call takes a power of two of its own, on a clock made by hand."""

    is_busy = True
    set_aside: Mapping[SampleKey, tuple[str, int]] = {}

    def __init__(self) -> None:
        self.now_s = 100.0
        self.fails = False

    def clock(self) -> float:
        return self.now_s

    def take(self, news: News, pieces: tuple[CachePiece, ...] = ()) -> None:
        self.now_s += 1.0
        if self.fails:
            raise RlhfSpecError("planted")

    def before_step(self) -> None:
        self.now_s += 2.0

    def after_step(self, finished: Sequence[Completion]) -> None:
        self.now_s += 4.0

    def tick(self) -> None:
        self.now_s += 8.0

    def hold(self) -> None:
        self.now_s += 16.0


def test_every_call_counts_and_nothing_between_calls() -> None:
    port = SlowPort()
    timed = TimedPort(port, port.clock)
    timed.take(Landed(move_id="0-0"))
    port.now_s += 1000.0
    timed.before_step()
    timed.after_step(())
    timed.tick()
    timed.hold()
    assert timed.seconds == 31.0


def test_a_call_that_fails_counts_too() -> None:
    port = SlowPort()
    port.fails = True
    timed = TimedPort(port, port.clock)
    with pytest.raises(RlhfSpecError, match="planted"):
        timed.take(Landed(move_id="0-0"))
    assert timed.seconds == 1.0


class SleepyDoor(SlowPort):
    """Some calls take real time."""

    NAP_S = 0.01

    def take(self, news: News, pieces: tuple[CachePiece, ...] = ()) -> None:
        time.sleep(self.NAP_S)

    def before_step(self) -> None:
        time.sleep(self.NAP_S)

    def after_step(self, finished: Sequence[Completion]) -> None:
        time.sleep(self.NAP_S)

    def tick(self) -> None:
        time.sleep(self.NAP_S)


def published(make_port: Callable[[DecodeLoop], MigrationPort] | None) -> tuple[GenerationStats, float]:
    """What an instance publishes after a message about a move and a decode step that ends a sample; the seconds."""
    loads: list[InstanceLoad] = []
    loop = DecodeLoop(
        "gen-0",
        FakeHost(FakeEngine("gen-0")),
        report_interval_s=0.0,
        on_report=loads.append,
        make_port=make_port,
    )
    loop.order(SubmitOrder(requests=(make_request(0),)))
    if make_port is not None:
        loop.order(NewsOrder(news=Landed(move_id="0-0")))
    began_s = time.monotonic()
    loop.run_once(wait_s=0.0)
    return loads[-1].stats, time.monotonic() - began_s


def test_the_load_says_how_long_the_decode_thread_was_at_the_door() -> None:
    stats, turn_s = published(lambda loop: SleepyDoor())
    num_calls = 4  # take, tick, before_step, after_step
    assert num_calls * SleepyDoor.NAP_S <= stats.move_s <= turn_s
    assert stats.num_decode_steps == 1, "what the engine counts is passed on"


def test_an_instance_that_moves_nothing_spends_nothing() -> None:
    stats, _ = published(None)
    assert stats.move_s == 0.0


def test_a_move_that_fails_half_way_ends_the_instance_for_everybody() -> None:
    """Nobody reads the answer to a peer's message: going on would decode what is in no known state."""
    port = SlowPort()
    port.fails = True
    loop = DecodeLoop(
        "gen-0", FakeHost(FakeEngine("gen-0")), report_interval_s=0.0, make_port=lambda loop: port
    )
    loop.order(NewsOrder(news=Landed(move_id="0-0")))
    with pytest.raises(RlhfSpecError, match="planted"):
        loop.run()
    with pytest.raises(RlhfSpecError, match="planted"):
        loop.poll(acknowledged=0, wait_s=0.0)


def test_a_message_for_an_instance_that_moves_no_samples_is_noted_and_harms_nothing(caplog) -> None:
    loop = DecodeLoop("gen-0", FakeHost(FakeEngine("gen-0")), report_interval_s=0.0)
    loop.order(NewsOrder(news=Landed(move_id="0-0")))
    loop.run_once(wait_s=0.0)
    assert "moves no samples" in caplog.text
    assert loop.poll(acknowledged=0, wait_s=0.0).completions == ()
