"""Whatever the decode thread gives to moves is counted and published with the load; a failed move ends the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from fake_engine import FakeEngine, FakeHost, make_request

from rlhfspec.actors.generation.decode_loop import DecodeLoop
from rlhfspec.actors.generation.loop_orders import HoldOrder, MoveEventOrder, SubmitOrder
from rlhfspec.core.decode_records import InstanceLoad
from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.core.records import Completion, SampleKey
from rlhfspec.engine.exchange import CachePiece
from rlhfspec.policies.migration.move_messages import Landed, MoveEvent


class SlowMigrator:
    """Every call takes a power of two of its own, on a clock made by hand."""

    is_busy = True
    set_aside: Mapping[SampleKey, tuple[str, int]] = {}

    def __init__(self) -> None:
        self.now_s = 100.0
        self.fails = False

    def clock(self) -> float:
        return self.now_s

    def take(self, event: MoveEvent, pieces: tuple[CachePiece, ...] = ()) -> None:
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


class SlowEngine(FakeEngine):
    """A decode step takes a thousand seconds of the same clock."""

    def __init__(self, migrator: SlowMigrator) -> None:
        super().__init__("gen-0")
        self._migrator = migrator

    def step(self) -> list[Completion]:
        self._migrator.now_s += 1000.0
        return super().step()


def make_loop(migrator: SlowMigrator, loads: list[InstanceLoad]) -> DecodeLoop:
    return DecodeLoop(
        "gen-0",
        FakeHost(SlowEngine(migrator)),
        report_interval_s=0.0,
        on_report=loads.append,
        make_migrator=lambda loop: migrator,
        clock=migrator.clock,
    )


def test_every_call_of_the_migrator_counts_and_decoding_does_not() -> None:
    loads: list[InstanceLoad] = []
    loop = make_loop(SlowMigrator(), loads)
    loop.order(SubmitOrder(requests=(make_request(0),)))
    loop.order(MoveEventOrder(event=Landed(move_id="0-0")))
    loop.order(HoldOrder(term=0))
    loop.run_once(wait_s=0.0)
    # take, before_step, after_step, tick, hold: once each
    assert loads[-1].stats.move_s == 31.0
    assert loads[-1].stats.num_decode_steps == 1, "what the engine counts is passed on"


def test_an_instance_that_moves_nothing_spends_nothing() -> None:
    loads: list[InstanceLoad] = []
    loop = DecodeLoop("gen-0", FakeHost(FakeEngine("gen-0")), report_interval_s=0.0, on_report=loads.append)
    loop.order(SubmitOrder(requests=(make_request(0),)))
    loop.run_once(wait_s=0.0)
    assert loads[-1].stats.move_s == 0.0


def test_a_move_that_fails_half_way_ends_the_instance_for_everybody() -> None:
    """Nobody reads the answer to a peer's message: going on would decode what is in no known state."""
    migrator = SlowMigrator()
    migrator.fails = True
    loop = make_loop(migrator, [])
    loop.order(MoveEventOrder(event=Landed(move_id="0-0")))
    with pytest.raises(RlhfSpecError, match="planted"):
        loop.run()
    with pytest.raises(RlhfSpecError, match="planted"):
        loop.poll(acknowledged=0, wait_s=0.0)


def test_a_message_for_an_instance_that_moves_no_samples_is_noted_and_harms_nothing(caplog) -> None:
    loop = DecodeLoop("gen-0", FakeHost(FakeEngine("gen-0")), report_interval_s=0.0)
    loop.order(MoveEventOrder(event=Landed(move_id="0-0")))
    loop.run_once(wait_s=0.0)
    assert "moves no samples" in caplog.text
    assert loop.poll(acknowledged=0, wait_s=0.0).completions == ()
