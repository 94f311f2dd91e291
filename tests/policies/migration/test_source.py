"""The source's machine: what every event comes to at every stage. Until it hands over, the sample is its own."""

import pytest
from move_messages import LANDED, READY, REFUSED, SHIPPED, SHIPPING_FAILED, order, settle

from rlhfspec.policies.migration.move_messages import CallOff, Claim, Verdict
from rlhfspec.policies.migration.source import (
    AskDestination,
    Forget,
    LetGo,
    SampleEnded,
    Say,
    Ship,
    SourceMove,
    SourceStage,
    StopShipping,
    TakeUp,
)
from rlhfspec.policies.reallocation.pool_records import MoveMode

CALL_OFF = CallOff(move_id="0-0", reason="b is lost: killed")
OWN, RELEASE = settle(Verdict.OWN, epoch=2), settle(Verdict.RELEASE)
EVENTS = {
    "ready": READY,
    "refused": REFUSED,
    "landed": LANDED,
    "shipped": SHIPPED,
    "shipping failed": SHIPPING_FAILED,
    "ended": SampleEnded(),
    "own": OWN,
    "release": RELEASE,
    "call off": CALL_OFF,
}
TIMEOUT_S = 5.0


def machine(stage: SourceStage, mode: MoveMode = MoveMode.MIGRATE) -> SourceMove:
    """A machine that got to a stage the usual way, at 0 s."""
    move = SourceMove(order(mode), now_s=0.0, timeout_s=TIMEOUT_S)
    assert move.begin() == [AskDestination()]
    usual = {
        SourceStage.PREPARING: (),
        SourceStage.SHIPPING: (READY,),
        SourceStage.HANDED_OVER: (READY, LANDED),
        SourceStage.DONE: (READY, LANDED, RELEASE),
    }[stage]
    for event in usual:
        move.handle(event, now_s=0.0)
    assert move.stage is stage
    return move


def keeps(reason: str, *, tell: bool = True) -> list:
    return [StopShipping(notify_destination=tell, reason=reason), Say(claim=Claim.KEPT, reason=reason)]


def asks_back(reason: str) -> list:
    return [Say(claim=Claim.TAKE_BACK, reason=reason)]


PREPARING, SHIPPING, HANDED_OVER, DONE = SourceStage
ENDED, SAID_NO = "finished before it left", "b refused: no free slot"
COMES_TO = {
    (PREPARING, "ready"): (SHIPPING, [Ship(ticket="ticket")]),
    (PREPARING, "refused"): (DONE, keeps(SAID_NO, tell=False)),
    (PREPARING, "ended"): (DONE, keeps(ENDED)),
    (PREPARING, "call off"): (DONE, keeps(CALL_OFF.reason)),
    (SHIPPING, "landed"): (HANDED_OVER, [LetGo()]),
    (SHIPPING, "refused"): (DONE, keeps(SAID_NO, tell=False)),
    (SHIPPING, "shipping failed"): (DONE, keeps("the wire broke")),
    (SHIPPING, "ended"): (DONE, keeps(ENDED)),
    (SHIPPING, "call off"): (DONE, keeps(CALL_OFF.reason)),
    (HANDED_OVER, "refused"): (HANDED_OVER, asks_back(SAID_NO)),
    (HANDED_OVER, "call off"): (HANDED_OVER, asks_back(CALL_OFF.reason)),
    (HANDED_OVER, "own"): (DONE, [TakeUp(epoch=2)]),
    (HANDED_OVER, "release"): (DONE, [Forget()]),
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("stage", list(SourceStage))
def test_every_event_at_every_stage(stage, event):
    move = machine(stage)
    expected_stage, expected_actions = COMES_TO.get((stage, event), (stage, []))
    assert move.handle(EVENTS[event], now_s=1.0) == expected_actions
    assert move.stage is expected_stage


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("stage", list(SourceStage))
def test_a_repeated_event_only_repeats_the_request(stage, event):
    move = machine(stage)
    first = move.handle(EVENTS[event], now_s=1.0)
    second = move.handle(EVENTS[event], now_s=1.0)
    asks_again = stage is HANDED_OVER and event in ("refused", "call off")
    assert second == (first if asks_again else [])


def test_a_sample_without_caches_to_ship_is_let_go_as_soon_as_a_slot_is_kept():
    move = SourceMove(order(MoveMode.RECOMPUTE), now_s=0.0, timeout_s=TIMEOUT_S)
    move.begin()
    assert move.handle(READY, now_s=0.0) == [LetGo()]
    assert move.stage is HANDED_OVER
    assert move.handle(LANDED, now_s=0.0) == []


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (PREPARING, "a waited 5.5 s for b to keep a slot"),
        (SHIPPING, "a waited 5.5 s for b to receive the caches"),
    ],
)
def test_a_timeout_ends_the_move_and_names_both_instances(stage, reason):
    move = machine(stage)
    assert move.tick(TIMEOUT_S) == []
    assert move.tick(5.5) == keeps(reason)
    assert move.stage is DONE and move.tick(100.0) == []


def test_a_source_without_a_verdict_asks_again_every_timeout_and_goes_on_waiting():
    move = machine(HANDED_OVER)
    reason = "a waited {:.1f} s for the scheduler's verdict on what b got"
    assert move.tick(5.5) == asks_back(reason.format(5.5))
    assert move.tick(10.0) == []
    assert move.tick(11.0) == asks_back(reason.format(5.5))
    assert move.stage is HANDED_OVER
    assert move.handle(OWN, now_s=11.0) == [TakeUp(epoch=2)]


def test_each_stage_has_the_whole_timeout():
    move = SourceMove(order(), now_s=0.0, timeout_s=TIMEOUT_S)
    move.begin()
    move.handle(READY, now_s=4.0)
    assert move.tick(8.9) == []
    move.handle(LANDED, now_s=8.9)
    assert move.tick(13.8) == [] and move.tick(14.0) != []


def test_a_sample_that_was_handed_over_is_never_kept_without_a_verdict():
    move = machine(HANDED_OVER)
    for event in (READY, LANDED, SHIPPED, SHIPPING_FAILED, SampleEnded(), REFUSED, CALL_OFF):
        actions = move.handle(event, now_s=1.0)
        assert all(isinstance(action, Say) and action.claim is Claim.TAKE_BACK for action in actions)
        assert move.stage is HANDED_OVER
