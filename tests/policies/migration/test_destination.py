"""The destination's machine: what every event comes to at every stage. A reserved slot is always freed or used."""

import pytest
from move_messages import (
    CANCEL,
    RECEIVED,
    RECEIVING_FAILED,
    hand_over,
    prepare,
    settle,
)

from rlhfspec.policies.migration.destination import (
    Answer,
    DestinationMove,
    DestinationStage,
    Drop,
    FreeSlot,
    KeepSlot,
    TakeIn,
)
from rlhfspec.policies.migration.move_messages import Claim, Landed, Refused, Verdict
from rlhfspec.policies.migration.source import Say
from rlhfspec.policies.reallocation.pool_records import MoveMode

HAND_OVER = hand_over()
OWN, RELEASE = settle(Verdict.OWN), settle(Verdict.RELEASE, epoch=2)
EVENTS = {
    "received": RECEIVED,
    "receiving failed": RECEIVING_FAILED,
    "hand over": HAND_OVER,
    "cancel": CANCEL,
    "own": OWN,
    "release": RELEASE,
}
TIMEOUT_S = 5.0
RESERVED, LANDED, RUNNING, DONE = DestinationStage


def machine(stage: DestinationStage) -> DestinationMove:
    """A machine that got to a stage the usual way, at 0 s."""
    move = DestinationMove(prepare(), now_s=0.0, timeout_s=TIMEOUT_S)
    assert move.begin(refusal="") == [KeepSlot(expect_frames=True)]
    usual = {
        RESERVED: (),
        LANDED: (RECEIVED,),
        RUNNING: (RECEIVED, HAND_OVER),
        DONE: (RECEIVED, HAND_OVER, OWN),
    }[stage]
    for event in usual:
        move.handle(event, now_s=0.0)
    assert move.stage is stage
    return move


def refuses(reason: str) -> list:
    return [FreeSlot(), Answer(message=Refused(move_id="0-0", reason=reason))]


COMES_TO = {
    (RESERVED, "received"): (LANDED, [Answer(message=Landed(move_id="0-0"))]),
    (RESERVED, "receiving failed"): (DONE, refuses("a damaged frame")),
    (RESERVED, "cancel"): (DONE, [FreeSlot()]),
    (RESERVED, "release"): (DONE, [FreeSlot()]),
    (LANDED, "hand over"): (
        RUNNING,
        [TakeIn(message=HAND_OVER), Say(claim=Claim.COMMIT, reason="it runs here")],
    ),
    (LANDED, "cancel"): (DONE, [FreeSlot()]),
    (LANDED, "release"): (DONE, [FreeSlot()]),
    (RUNNING, "own"): (DONE, []),
    (RUNNING, "release"): (DONE, [Drop()]),
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("stage", list(DestinationStage))
def test_every_event_at_every_stage(stage, event):
    move = machine(stage)
    expected_stage, expected_actions = COMES_TO.get((stage, event), (stage, []))
    actions = move.handle(EVENTS[event], now_s=1.0)
    # a hand-over holds arrays: compared by identity
    assert [type(action) for action in actions] == [type(action) for action in expected_actions]
    for action, expected in zip(actions, expected_actions, strict=True):
        assert action.message is HAND_OVER if isinstance(action, TakeIn) else action == expected
    assert move.stage is expected_stage


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("stage", list(DestinationStage))
def test_a_repeated_event_does_nothing(stage, event):
    move = machine(stage)
    move.handle(EVENTS[event], now_s=1.0)
    assert move.handle(EVENTS[event], now_s=1.0) == []


def test_a_sample_is_refused_at_once_and_no_slot_is_kept():
    move = DestinationMove(prepare(), now_s=0.0, timeout_s=TIMEOUT_S)
    refused = Refused(move_id="0-0", reason="no free slot")
    assert move.begin(refusal="no free slot") == [Answer(message=refused)]
    assert move.is_done and move.handle(HAND_OVER, now_s=0.0) == []


def test_without_caches_to_ship_the_slot_alone_is_waited_for():
    move = DestinationMove(prepare(MoveMode.RECOMPUTE), now_s=0.0, timeout_s=TIMEOUT_S)
    assert move.begin(refusal="") == [KeepSlot(expect_frames=False)]
    assert move.stage is LANDED
    assert [type(action) for action in move.handle(HAND_OVER, now_s=0.0)] == [TakeIn, Say]


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (RESERVED, "b waited 5.5 s for the caches from a"),
        (LANDED, "b waited 5.5 s for the hand-over from a"),
    ],
)
def test_a_timeout_frees_the_slot_and_names_both_instances(stage, reason):
    move = machine(stage)
    assert move.tick(TIMEOUT_S) == []
    assert move.tick(5.5) == refuses(reason)
    assert move.is_done and move.tick(100.0) == []


def test_a_destination_without_a_verdict_claims_again_every_timeout_and_goes_on_decoding():
    move = machine(RUNNING)
    reason = "no verdict of the scheduler for 5.5 s"
    assert move.tick(5.5) == [Say(claim=Claim.COMMIT, reason=reason)]
    assert move.tick(10.0) == []
    assert move.tick(11.0) == [Say(claim=Claim.COMMIT, reason=reason)]
    assert move.stage is RUNNING


@pytest.mark.parametrize("stage", [RESERVED, LANDED])
def test_a_failed_import_frees_the_slot_and_tells_the_source(stage):
    assert machine(stage).refuse("another weight version", now_s=1.0) == refuses("another weight version")


@pytest.mark.parametrize("stage", list(DestinationStage))
@pytest.mark.parametrize("order", ["there", "back"])
def test_a_reserved_slot_is_freed_or_used_exactly_once(stage, order):
    move = machine(stage)
    events = [*EVENTS.values()] if order == "there" else [*EVENTS.values()][::-1]
    done = [action for event in events for action in move.handle(event, now_s=1.0)]
    done += move.tick(100.0) + move.tick(200.0)
    ends = [action for action in done if isinstance(action, (FreeSlot, TakeIn))]
    assert len(ends) == (stage in (RESERVED, LANDED))
