"""Who owns a sample: COMMIT and TAKE_BACK race at the scheduler, the first wins, repeats change nothing."""

import itertools
from dataclasses import replace

import pytest
from move_messages import complete, move, report, request

from rlhfspec.policies.migration.move_messages import CallOff, Claim, MoveOrder, Settle
from rlhfspec.policies.scheduling.events import (
    Abandon,
    Alarm,
    Deliver,
    InstanceGone,
    InstanceJoined,
    InstanceReported,
    MoveEnded,
    SamplesArrived,
    SendVerdict,
    StartMove,
    Submit,
)
from rlhfspec.policies.scheduling.ownership import Ruling, rule_on_commit, rule_on_take_back
from rlhfspec.policies.scheduling.scheduler import MOVE_TIMEOUT_S, Scheduler

ASKED = request(0)
KEY = ASKED.key
COMMIT = report(Claim.COMMIT, epoch=1, key=KEY)
TAKE_BACK = report(Claim.TAKE_BACK, epoch=0, key=KEY)
KEPT = report(Claim.KEPT, epoch=0, key=KEY)
BY = {Claim.COMMIT: "b", Claim.TAKE_BACK: "a", Claim.KEPT: "a"}


def moving() -> Scheduler:
    """Sample 0 on its way from a to b, under epoch 0."""
    scheduler = Scheduler(heartbeat_timeout_s=10.0)
    scheduler.handle(InstanceJoined(instance="a", num_slots=2, now_s=0.0))
    scheduler.handle(SamplesArrived(requests=(ASKED,)))
    scheduler.handle(InstanceJoined(instance="b", num_slots=2, now_s=0.0))
    assert scheduler.move([move(KEY)], now_s=0.0) != []
    return scheduler


def request_at(epoch: int):
    return replace(ASKED, epoch=epoch)


def say(scheduler: Scheduler, *reports, now_s: float = 1.0) -> list:
    return [
        order
        for one in reports
        for order in scheduler.handle(InstanceReported(instance=BY[one.claim], now_s=now_s, moves=(one,)))
    ]


def owner(scheduler: Scheduler) -> tuple[str | None, int]:
    (sample,) = scheduler.open_samples()
    return sample.owner, sample.request.epoch


def verdicts(orders) -> list[tuple[str, str, int]]:
    return [
        (o.instance, str(o.verdict.verdict), o.verdict.epoch)
        for o in orders
        if isinstance(o, SendVerdict) and isinstance(o.verdict, Settle)
    ]


def ended(orders) -> list[str]:
    return [order.record.outcome for order in orders if isinstance(order, MoveEnded)]


def test_a_commit_alone_makes_the_destination_owner_and_the_source_let_go():
    scheduler = moving()
    orders = say(scheduler, COMMIT)
    assert owner(scheduler) == ("b", 1) and scheduler.instances() == {"a": 0, "b": 1}
    assert verdicts(orders) == [("b", "own", 1), ("a", "release", 1)]
    assert ended(orders) == ["moved"]


def test_a_take_back_alone_returns_the_sample_under_an_epoch_that_the_destination_cannot_have():
    scheduler = moving()
    orders = say(scheduler, TAKE_BACK)
    assert owner(scheduler) == ("a", 2) and scheduler.instances() == {"a": 1, "b": 0}
    assert verdicts(orders) == [("a", "own", 2), ("b", "release", 2)]
    assert ended(orders) == ["taken back"]


@pytest.mark.parametrize(
    "claims", [c for n in (2, 3, 4) for c in itertools.product((COMMIT, TAKE_BACK), repeat=n)]
)
def test_the_first_claim_wins_whatever_follows_and_however_often(claims):
    scheduler = moving()
    orders = say(scheduler, *claims)
    winner = claims[0]
    assert owner(scheduler) == (("b", 1) if winner is COMMIT else ("a", 2))
    assert len(ended(orders)) == 1
    for one in claims[1:]:
        told = verdicts(say(scheduler, one))
        assert told == [(BY[one.claim], "own" if one is winner else "release", owner(scheduler)[1])] or (
            # a claim that lost is answered under the epoch it claimed
            told == [("b", "release", 1)] and one is COMMIT
        )


@pytest.mark.parametrize("claim", [COMMIT, TAKE_BACK])
def test_a_claim_on_a_sample_that_is_complete_is_denied(claim):
    scheduler = moving()
    scheduler.handle(InstanceReported(instance="a", now_s=1.0, completions=(complete(ASKED, "a"),)))
    assert scheduler.num_open == 0
    assert [verdict for _, verdict, _ in verdicts(say(scheduler, claim))] == ["release"]


def test_a_sample_that_was_kept_stays_under_its_epoch_and_can_be_ordered_again():
    scheduler = moving()
    assert ended(say(scheduler, KEPT)) == ["kept"] and owner(scheduler) == ("a", 0)
    assert say(scheduler, KEPT) == []
    (order,) = scheduler.move([move(KEY)], now_s=2.0)
    assert isinstance(order, StartMove) and (order.order.move_id, order.order.epoch) == ("0-1", 0)


def back_and_forth(scheduler: Scheduler) -> None:
    """a -> b -> a, both committed: owner a under epoch 2, as after a take-back."""
    say(scheduler, COMMIT)
    scheduler.move([move(KEY, "b", "a")], now_s=1.0)
    returned = report(Claim.COMMIT, epoch=2, move_id="0-1", key=KEY, source="b", destination="a")
    scheduler.handle(InstanceReported(instance="a", now_s=1.0, moves=(returned,)))
    assert owner(scheduler) == ("a", 2)


def test_what_was_set_aside_for_a_move_that_went_well_is_not_taken_up_when_the_sample_comes_back():
    scheduler = moving()
    back_and_forth(scheduler)
    assert verdicts(say(scheduler, TAKE_BACK)) == [("a", "release", 2)]
    assert owner(scheduler) == ("a", 2)


def test_a_repeated_commit_of_an_older_move_is_denied_when_the_sample_has_moved_on():
    scheduler = moving()
    back_and_forth(scheduler)
    assert verdicts(say(scheduler, COMMIT)) == [("b", "release", 2)]


def test_epochs_only_grow_along_any_way_of_a_sample():
    scheduler = moving()
    seen = [owner(scheduler)[1]]
    back_and_forth(scheduler)
    seen.append(owner(scheduler)[1])
    scheduler.handle(InstanceGone(instance="a", reason="killed"))
    seen.append(owner(scheduler)[1])
    assert owner(scheduler)[0] == "b"
    scheduler.handle(InstanceGone(instance="b", reason="killed"))
    seen.append(owner(scheduler)[1])
    assert owner(scheduler)[0] is None and seen == sorted(set(seen))


def test_a_source_lost_before_anyone_claimed_ends_the_move_and_its_copy_at_the_destination():
    scheduler = moving()
    orders = scheduler.handle(InstanceGone(instance="a", reason="killed"))
    assert ended(orders) == ["lost"] and verdicts(orders) == [("b", "release", 2)]
    assert [type(order) for order in orders] == [MoveEnded, SendVerdict, Abandon, Submit]
    assert owner(scheduler) == ("b", 2)
    # the copy that was handed over by the dead source, and its completion, count for nothing
    assert verdicts(say(scheduler, COMMIT)) == [("b", "release", 2)]
    stale = complete(request_at(1), "b")
    assert scheduler.handle(InstanceReported(instance="b", now_s=2.0, completions=(stale,))) == []
    fresh = complete(request_at(2), "b")
    (delivered,) = scheduler.handle(InstanceReported(instance="b", now_s=2.0, completions=(fresh,)))
    assert isinstance(delivered, Deliver) and delivered.completion is fresh


def test_a_source_lost_after_the_commit_costs_nothing():
    scheduler = moving()
    say(scheduler, COMMIT)
    orders = scheduler.handle(InstanceGone(instance="a", reason="killed"))
    assert orders == [Abandon(instance="a", reason="killed", num_requeued=0)]
    assert owner(scheduler) == ("b", 1)


@pytest.mark.parametrize("answer", [KEPT, TAKE_BACK])
def test_a_destination_lost_before_the_commit_leaves_the_sample_to_its_source(answer):
    scheduler = moving()
    orders = scheduler.handle(InstanceGone(instance="b", reason="killed"))
    (call_off,) = [o.verdict for o in orders if isinstance(o, SendVerdict)]
    assert isinstance(call_off, CallOff) and "b is lost: killed" in call_off.reason
    orders = say(scheduler, answer)
    assert len(ended(orders)) == 1
    assert owner(scheduler) == ("a", 0 if answer is KEPT else 2)
    assert [who for who, _, _ in verdicts(orders)] == ([] if answer is KEPT else ["a"])


def test_a_dead_destination_claims_nothing_and_its_late_report_is_only_compared():
    scheduler = moving()
    scheduler.handle(InstanceGone(instance="b", reason="silent"))
    late = complete(request_at(1), "b")
    assert say(scheduler, COMMIT) == [] and owner(scheduler) == ("a", 0)
    assert scheduler.handle(InstanceReported(instance="b", now_s=2.0, completions=(late,))) == []
    say(scheduler, KEPT)
    accepted = scheduler.handle(
        InstanceReported(instance="a", now_s=2.0, completions=(complete(ASKED, "a"),))
    )
    assert [type(order) for order in accepted] == [Deliver]


def test_a_dead_destinations_late_report_that_differs_is_an_alarm():
    scheduler = moving()
    scheduler.handle(InstanceGone(instance="b", reason="silent"))
    wrong = complete(request_at(1), "b", token=99)
    scheduler.handle(InstanceReported(instance="b", now_s=2.0, completions=(wrong,)))
    say(scheduler, KEPT)
    orders = scheduler.handle(InstanceReported(instance="a", now_s=2.0, completions=(complete(ASKED, "a"),)))
    assert [type(order) for order in orders] == [Deliver, Alarm]


def test_a_destination_lost_after_the_commit_takes_the_sample_with_it():
    scheduler = moving()
    say(scheduler, COMMIT)
    scheduler.handle(InstanceGone(instance="b", reason="killed"))
    who, epoch = owner(scheduler)
    assert who == "a" and epoch > 2, "no copy set aside at the source can have this epoch"
    assert verdicts(say(scheduler, TAKE_BACK)) == [("a", "release", epoch)]


def test_both_lost_at_once_the_sample_waits_for_whoever_joins():
    scheduler = moving()
    scheduler.handle(InstanceGone(instance="b", reason="killed"))
    orders = scheduler.handle(InstanceGone(instance="a", reason="killed"))
    assert ended(orders) == ["lost"] and scheduler.num_waiting == 1
    (submit,) = scheduler.handle(InstanceJoined(instance="c", num_slots=1, now_s=3.0))
    assert isinstance(submit, Submit) and submit.requests[0].epoch >= 2


def test_a_copy_that_is_lost_at_its_owner_starts_again_and_only_once():
    scheduler = moving()
    say(scheduler, TAKE_BACK)
    lost = report(Claim.LOST, epoch=2, key=KEY)
    orders = scheduler.handle(InstanceReported(instance="a", now_s=1.0, moves=(lost,)))
    (submit,) = [order for order in orders if isinstance(order, Submit)]
    assert submit.requests[0].epoch == 4
    assert scheduler.handle(InstanceReported(instance="a", now_s=1.0, moves=(lost,))) == []


def test_a_move_of_which_nothing_is_heard_is_called_off_and_says_who_was_waited_for():
    scheduler = moving()
    for second in range(int(MOVE_TIMEOUT_S) + 1):
        assert scheduler.reallocate(float(second)) == []
    gone, call_off = scheduler.reallocate(MOVE_TIMEOUT_S + 1.0)
    assert isinstance(gone, MoveEnded) and gone.record.outcome == "lost"
    assert gone.record.why_ended == "the scheduler waited 60 s for a and b to end it"
    assert isinstance(call_off, SendVerdict) and call_off.instance == "a"
    assert owner(scheduler) == ("a", 0)
    # it went on behind the scheduler's back, and is still ruled on by its epoch
    assert verdicts(say(scheduler, COMMIT))[0] == ("b", "own", 1)


def test_rulings_do_not_depend_on_anything_but_owner_epoch_and_move():
    for owner_name, epoch, is_ours in itertools.product((None, "a", "b", "c"), range(4), (True, False)):
        commit = rule_on_commit(COMMIT, epoch=epoch, owner=owner_name, is_ours=is_ours)
        granted = (owner_name, epoch, is_ours) == ("a", 0, True)
        confirmed = (owner_name, epoch) == ("b", 1)
        assert commit is (Ruling.GRANTED if granted else Ruling.CONFIRMED if confirmed else Ruling.DENIED)
        for taken_back in ("", "0-0", "0-9"):
            back = rule_on_take_back(
                TAKE_BACK, epoch=epoch, owner=owner_name, taken_back=taken_back, is_ours=is_ours
            )
            confirmed = (owner_name, epoch, taken_back) == ("a", 2, "0-0")
            assert back is (Ruling.GRANTED if granted else Ruling.CONFIRMED if confirmed else Ruling.DENIED)


def test_an_order_carries_the_owners_epoch_and_a_name_of_its_own():
    orders = [o.order for o in moving().move([move(KEY)], now_s=0.0) if isinstance(o, StartMove)]
    assert orders == [], "a sample is moved by one order at a time"
    order = moving().moves.of(KEY)
    assert isinstance(order, MoveOrder) and (order.source, order.destination, order.epoch) == ("a", "b", 0)
