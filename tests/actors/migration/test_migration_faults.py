"""Every message of a move dropped, doubled, late; every frame fault: no sample is lost, changed or delivered twice.

Each run checks the laws that hold whatever happens (`one_move.OneMove.run`); the tests add what each fault must
come to: an end within RECOVERY_TURNS, a reason that says who waited for whom, a pair that works again.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import tiny_pool
import torch
from in_process import FaultPlan
from one_move import (
    DESTINATION,
    RECOVERY_TURNS,
    SOURCE,
    OneMove,
    delay,
    drop,
    duplicate,
    echo,
)

from rlhfspec.actors.generation import decode_loop
from rlhfspec.core.errors import WeightsError
from rlhfspec.core.weight_records import WeightManifest
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.weights.chunks import pack_weights, unpack_weights
from rlhfspec.policies.reallocation.pool_records import MoveMode
from rlhfspec.policies.scheduling.events import MoveRecord

FAULTS = (drop, duplicate, delay, echo)
OWN_TO_DESTINATION, RELEASE_TO_SOURCE = f"own to {DESTINATION}", f"release to {SOURCE}"
OWN_TO_SOURCE, RELEASE_TO_DESTINATION = f"own to {SOURCE}", f"release to {DESTINATION}"
MESSAGES = ("MoveOrder", "Prepare", "Ready", "Landed", "HandOver", OWN_TO_DESTINATION, RELEASE_TO_SOURCE)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def one_move() -> Iterator[Callable[..., OneMove]]:
    made: list[OneMove] = []

    def make(**settings) -> OneMove:
        made.append(OneMove(**settings))
        return made[-1]

    yield make
    for move in made:
        move.pool.close()


def turns_of(record: MoveRecord) -> int:
    return round((record.ended_s - record.ordered_s) * 100)


def check_recovery(records: list[MoveRecord]) -> None:
    """The first move ended in time and says why; the last one went well."""
    first, last = records[0], records[-1]
    assert turns_of(first) <= RECOVERY_TURNS
    assert first.outcome in ("moved", "kept", "taken back")
    if first.outcome != "moved":
        assert SOURCE in first.why_ended or DESTINATION in first.why_ended, first.why_ended
    assert last is not first and last.outcome == "moved", last.why_ended


def test_moves_without_faults_succeed_within_six_turns(one_move):
    records = one_move().run()
    assert [record.outcome for record in records] == ["moved", "moved"]
    assert max(turns_of(record) for record in records) <= 6


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("message", MESSAGES)
def test_a_move_recovers_in_time_from_any_lost_doubled_or_late_message(one_move, message, fault):
    # without Ready the destination waits for frames on a channel that the moves under way meanwhile share, and lose
    move = one_move(count=4 if message == "Ready" else 2)
    move.plants[message] = fault
    records = move.run()
    if message == "MoveOrder" and fault in (drop, delay):
        # the scheduler hears nothing and forgets it at last; a sample that finishes ends it before
        assert {record.outcome for record in records} == {"kept" if fault is drop else "moved", "moved"}
        return
    check_recovery(records)
    if fault in (duplicate, echo) or message in (OWN_TO_DESTINATION, RELEASE_TO_SOURCE):
        assert records[0].outcome == "moved"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Prepare", f"{SOURCE} waited 0.1 s for {DESTINATION} to keep a slot"),
        ("Landed", f"{SOURCE} waited 0.1 s for {DESTINATION} to receive the caches"),
        ("HandOver", f"{DESTINATION} waited 0.1 s for the hand-over from {SOURCE}"),
    ],
)
def test_the_reason_of_a_failed_move_says_who_waited_for_whom(one_move, message, reason):
    move = one_move()
    move.plants[message] = drop
    assert reason in move.run()[0].why_ended


@pytest.mark.parametrize("fault", [drop, echo])
@pytest.mark.parametrize("message", ["Prepare", "Ready", "HandOver"])
def test_a_recompute_move_recovers_in_time_from_any_faulty_message(one_move, message, fault):
    move = one_move(mode=MoveMode.RECOMPUTE)
    move.plants[message] = fault
    check_recovery(move.run())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("provoked_by", "message"),
    [
        ("Landed", "Cancel"),
        ("HandOver", "Refused"),
        ("HandOver", OWN_TO_SOURCE),
        ("HandOver", RELEASE_TO_DESTINATION),
    ],
)
def test_a_second_fault_during_recovery_is_recovered_from_in_time(one_move, provoked_by, message, fault):
    move = one_move()
    move.plants[provoked_by] = drop
    move.plants[message] = fault
    first = move.run()[0]
    assert first.outcome in ("kept", "taken back") and turns_of(first) <= RECOVERY_TURNS


def full(pool, receiver, message):
    """The destination's slots are taken by what the scheduler does not know of."""
    exchange = pool.instances[DESTINATION].engine.exchange
    taken = exchange.num_free_slots
    exchange.num_reserved += taken
    pool.after(3, lambda: setattr(exchange, "num_reserved", exchange.num_reserved - taken))
    return [message]


@pytest.mark.parametrize("fault", [None, drop, delay])
@pytest.mark.parametrize("mode", list(MoveMode))
def test_a_destination_without_a_free_slot_refuses_and_the_sample_stays(one_move, mode, fault):
    move = one_move(mode=mode)
    move.plants["Prepare"] = full
    if fault is not None:
        move.plants["Refused"] = fault
    records = move.run()
    assert records[0].outcome == "kept"
    lost = fault in (drop, delay)
    reason = "to keep a slot" if lost else f"{DESTINATION} refused: no free slot among 4"
    assert reason in records[0].why_ended
    assert records[1].outcome == "moved"


def test_a_destination_whose_context_is_too_short_refuses_and_the_sample_stays(one_move):
    def cramp(pool, receiver, message):
        engine = pool.instances[DESTINATION].engine
        most, engine.max_total_tokens = engine.max_total_tokens, message.most_tokens - 1
        pool.after(1, lambda: setattr(engine, "max_total_tokens", most))
        return [message]

    move = one_move()
    move.plants["Prepare"] = cramp
    records = move.run()
    assert [record.outcome for record in records] == ["kept", "moved"]
    assert "the context here is" in records[0].why_ended


def test_a_second_order_for_a_sample_that_is_leaving_is_answered_and_ends_nothing(one_move, caplog):
    """Two hand-overs of one sample would be one too many for the decode loop."""
    second = []

    def order_again(pool, receiver, message):
        second.append(replace(message.order, move_id="0-99", mode=MoveMode.RECOMPUTE))
        pool.send(SOURCE, second[0])
        return [message]

    caplog.set_level(logging.DEBUG, logger=decode_loop.__name__)
    move = one_move()
    move.plants["Prepare"] = order_again
    assert [record.outcome for record in move.run()] == ["moved", "moved"]
    assert any("of move 0-99" in line and line.startswith(f"{SOURCE}, ") for line in caplog.messages)


def test_a_destination_that_waits_for_frames_of_a_move_that_is_over_hears_that_none_will_come(one_move):
    move = one_move(count=1, frame_timeout_s=10.0)
    move.plants["Ready"] = delay
    assert move.run()[0].outcome == "kept"
    began_s = time.monotonic()
    while move.pool.instances[DESTINATION].transfers.awaited:
        assert time.monotonic() < began_s + 5.0, "it waits for the frames' whole timeout"
        time.sleep(0.01)
    (wire,) = move.pool.hub.wires.values()
    assert not wire.broken.is_set(), "the channel is as good as before"


FRAME_FAULTS = {
    "dropped": lambda k: FaultPlan(drop=frozenset([k])),
    "doubled": lambda k: FaultPlan(duplicate=frozenset([k])),
    "damaged": lambda k: FaultPlan(corrupt=frozenset([k])),
    "broken": lambda k: FaultPlan(fail=frozenset([k])),
    "late": lambda k: FaultPlan(delay_s={k: 0.6}),
}


@pytest.mark.parametrize(
    ("what", "number"), [(what, n) for what in FRAME_FAULTS for n in (0, 1) if (what, n) != ("doubled", 1)]
)
def test_a_faulty_frame_keeps_the_sample_and_replaces_the_channel_once(one_move, what, number):
    """Frame 0 is the draft cache's, frame 1 the target cache's and the last."""
    move = one_move(frame_faults=FRAME_FAULTS[what](number))
    records = move.run()
    check_recovery(records)
    assert records[0].outcome == "kept"
    assert len(move.pool.hub.wires) == 2, "the broken channel is replaced, once"


def test_a_doubled_last_frame_fails_the_next_move_only(one_move):
    move = one_move(frame_faults=FRAME_FAULTS["doubled"](1), count=3)
    records = move.run()
    assert [record.outcome for record in records] == ["moved", "kept", "moved"]
    assert DESTINATION in records[1].why_ended


def refit(engine: Engine, version: int) -> None:
    """Another draft model: the cache of the old one is worth nothing."""
    manifest, chunks = pack_weights(tiny_pool.target(), name="draft", weight_version=version)
    engine.load_weights(manifest, unpack_weights(manifest, chunks))


@pytest.mark.parametrize("who", [(SOURCE,), (DESTINATION,), (SOURCE, DESTINATION)])
@pytest.mark.parametrize("message", ["Prepare", "Ready", "Landed", "HandOver"])
def test_a_draft_refit_during_a_move_discards_the_shipped_draft_cache(one_move, message, who):
    def load(pool, receiver, arriving):
        for name in who:
            pool.after(0, lambda name=name: refit(pool.instances[name].engine, 1))
        return [arriving]

    move = one_move()
    exchange = move.pool.instances[DESTINATION].engine.exchange
    attach, parts = exchange.attach, []

    def noted(state, pieces):
        parts.append({piece.part for piece in pieces})
        return attach(state, pieces)

    exchange.attach = noted
    move.plants[message] = load
    assert move.run()[0].outcome == "moved"
    # with the hand-over the load comes too late: the sample has been taken in
    assert parts[0] == ({"draft", "target"} if message == "HandOver" else {"target"})


def reload_target(engine: Engine) -> WeightManifest:
    """The same weights under a new version."""
    manifest, chunks = pack_weights(tiny_pool.target(), name="target", weight_version=1)
    engine.load_weights(manifest, unpack_weights(manifest, chunks))
    return manifest


def test_target_weights_are_refused_while_samples_are_open_and_a_move_goes_on(one_move):
    refused = []

    def load(pool, receiver, message):
        for name in (SOURCE, DESTINATION):
            with pytest.raises(WeightsError, match="drain it first"):
                reload_target(pool.instances[name].engine)
            refused.append(name)
        return [message]

    move = one_move()
    move.plants["Landed"] = load
    assert move.run()[0].outcome == "moved" and refused == [SOURCE, DESTINATION]


def test_a_destination_whose_target_changed_meanwhile_refuses_the_hand_over(one_move):
    def load(pool, receiver, message):
        engine = pool.instances[DESTINATION].engine
        # its own samples go back to the scheduler, as after a drain
        engine.weight_version = 1
        pool.after(2, lambda: setattr(engine, "weight_version", 0))
        return [message]

    move = one_move()
    move.plants["HandOver"] = load
    first = move.run()[0]
    assert first.outcome == "taken back" and "weight version 0" in first.why_ended


def test_a_source_whose_target_changed_meanwhile_lets_the_sample_start_again(one_move):
    def load(pool, receiver, message):
        engine = pool.instances[SOURCE].engine
        engine.weight_version = 1
        pool.after(1, lambda: setattr(engine, "weight_version", 0))
        return [message]

    move = one_move(count=1)
    move.plants["HandOver"] = drop
    move.plants[OWN_TO_SOURCE] = load
    records = move.run()
    assert records[0].outcome == "taken back"
    epochs = {key.sample_index: c.epoch for key, c in move.pool.outcome.completions.items()}
    assert epochs[records[0].order.key.sample_index] == 4, "taken back under 2, given out again under 4"
