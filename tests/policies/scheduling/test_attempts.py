"""Attempts at the next batch: they fill what no sample wants, and leave nothing but drafts. No Ray here."""

from dataclasses import replace

import numpy as np
from move_messages import complete, request

from rlhfspec.core.records import ATTEMPT_EPOCH, Completion, FinishReason, SampleRequest
from rlhfspec.policies.reallocation.pool_records import Move, MoveMode
from rlhfspec.policies.reallocation.rate_curve import RateCurve
from rlhfspec.policies.scheduling.attempts import AttemptCounts
from rlhfspec.policies.scheduling.events import (
    Abandon,
    AttemptsArrived,
    AttemptsEnd,
    ClockTicked,
    Cut,
    Deliver,
    InstanceGone,
    InstanceJoined,
    InstanceLeaves,
    InstanceReported,
    InstanceSnapshot,
    Left,
    SamplesArrived,
    StartMove,
    Submit,
)
from rlhfspec.policies.scheduling.look_ahead import LookAheadLaw
from rlhfspec.policies.scheduling.scheduler import Scheduler


def law(most: int | None = 2) -> LookAheadLaw:
    return LookAheadLaw(RateCurve([1, 32], [1 / 7e-3, 32 / 7e-3]), np.zeros(32), most=most)


def machine(*slots: int, most: int | None = 2) -> Scheduler:
    scheduler = Scheduler(heartbeat_timeout_s=10.0, look_ahead=law(most))
    for name, num_slots in zip("abc", slots, strict=False):
        scheduler.handle(InstanceJoined(instance=name, num_slots=num_slots, now_s=0.0))
    return scheduler


def asked(*indices: int) -> SamplesArrived:
    return SamplesArrived(requests=tuple(request(index) for index in indices))


def ahead(*indices: int) -> AttemptsArrived:
    return AttemptsArrived(requests=tuple(request(index) for index in indices))


def attempts(orders) -> dict[str, list[int]]:
    given = {o.instance: [r for r in o.requests if r.is_attempt] for o in orders if isinstance(o, Submit)}
    assert all(r.epoch == ATTEMPT_EPOCH for requests in given.values() for r in requests)
    return {name: [r.key.sample_index for r in requests] for name, requests in given.items() if requests}


def came_of(index: int, name: str, *tokens: int, reason: FinishReason = FinishReason.CUT) -> InstanceReported:
    whole = complete(request(index), name)
    done = replace(
        whole, epoch=ATTEMPT_EPOCH, token_ids=np.array(tokens, dtype=np.int64), finish_reason=reason
    )
    return report(name, done)


def report(name: str, *completions: Completion) -> InstanceReported:
    return InstanceReported(instance=name, now_s=0.0, completions=completions)


def only(orders) -> SampleRequest:
    ((one,),) = [order.requests for order in orders if isinstance(order, Submit)]
    return one


def test_they_wait_for_free_slots_and_then_go_to_the_emptiest_in_their_order():
    scheduler = machine(2, 3)
    scheduler.handle(asked(*range(6)))
    assert scheduler.num_waiting == 1 and attempts(scheduler.handle(ahead(10, 11, 12, 13, 14))) == {}
    # the first slot is a waiting sample's, the second nobody's
    assert attempts(scheduler.handle(report("a", complete(request(0), "a")))) == {}
    assert attempts(scheduler.handle(report("b", complete(request(1), "b")))) == {"b": [10]}
    done = scheduler.handle(report("a", *(complete(request(index), "a") for index in (2, 5))))
    assert attempts(done) == {"a": [11, 12]}
    assert attempts(scheduler.handle(ClockTicked(now_s=1.0))) == {}, "no more slots, and each at most once"


def test_they_run_while_no_sample_is_open_and_the_law_limits_them():
    assert attempts(machine(4, 4, most=1).handle(ahead(10, 11, 12))) == {"a": [10], "b": [11]}
    assert attempts(machine(2, 2, most=None).handle(ahead(10, 11, 12))) == {"a": [10, 12], "b": [11]}
    without = Scheduler(heartbeat_timeout_s=10.0)
    without.handle(InstanceJoined(instance="a", num_slots=2, now_s=0.0))
    assert without.handle(ahead(10)) == [] and without.attempt_counts == AttemptCounts()


def test_the_ledger_knows_nothing_of_them():
    scheduler = machine(2, 2)
    scheduler.handle(ahead(10, 11, 12, 13))
    assert scheduler.num_open == scheduler.num_waiting == 0 and scheduler.instances() == {"a": 0, "b": 0}
    # samples and moves take the slots as if nothing were there
    orders = scheduler.handle(asked(0, 1, 2))
    assert sum(len(order.requests) for order in orders) == 3 and attempts(orders) == {}
    key = next(iter(scheduler.members["a"].owned))
    move = Move(key=key, source="a", destination="b", mode=MoveMode.MIGRATE, gain_s=1.0, reason="")
    (started,) = scheduler.move([move], now_s=0.0)
    assert isinstance(started, StartMove)


def test_what_came_of_one_is_the_draft_of_its_sample_and_is_proved():
    scheduler = machine(2)
    scheduler.handle(ahead(10, 11))
    assert scheduler.handle(came_of(10, "a", 10, 11, 99, 98)) == []
    assert scheduler.handle(came_of(10, "a", 10, 11)) == [], "the longest counts"
    one = only(scheduler.handle(asked(10)))
    assert not one.is_attempt and one.epoch == 0 and one.draft.tolist() == [10, 11, 99, 98]
    before = scheduler.attempt_counts
    assert before == AttemptCounts(num_attempts=2, num_attempted_tokens=6)
    orders = scheduler.handle(report("a", complete(one, "a")))
    assert isinstance(orders[0], Deliver)
    assert scheduler.attempt_counts - before == AttemptCounts(
        num_drafts=1, num_draft_tokens=4, num_proved_tokens=2
    )


def test_an_attempt_is_fresher_than_what_a_request_brings():
    scheduler = machine(2)
    scheduler.handle(ahead(10, 11))
    scheduler.handle(came_of(10, "a", 10, 11))
    brought = tuple(replace(request(index), draft=np.array([7])) for index in (10, 11))
    (order,) = [one for one in scheduler.handle(SamplesArrived(requests=brought)) if isinstance(one, Submit)]
    assert [one.draft.tolist() for one in order.requests] == [[10, 11], [7]]


def test_once_weights_are_published_nothing_more_is_begun():
    scheduler = machine(1)
    first = scheduler.handle(ahead(10, 11))
    assert len(first) == 1
    scheduler.handle(AttemptsEnd())
    assert scheduler.handle(came_of(10, "a", 10)) == []
    assert scheduler.handle(ClockTicked(now_s=1.0)) == []


def test_a_lost_instance_s_attempts_are_made_elsewhere_and_a_lost_sample_keeps_its_draft():
    scheduler = machine(2, 2)
    assert attempts(scheduler.handle(ahead(10, 11, 12, 13, 14)))["a"] == [10, 12]
    orders = scheduler.handle(InstanceGone(instance="a", reason="killed"))
    assert orders == [Abandon(instance="a", reason="killed", num_requeued=0)]
    # in their old order, before what was never placed; the late report of one is as good as another
    scheduler.handle(came_of(10, "a", 10))
    joined = scheduler.handle(InstanceJoined(instance="c", num_slots=2, now_s=0.0))
    assert attempts(joined) == {"c": [12, 14]}
    assert only(scheduler.handle(asked(10))).draft.tolist() == [10]
    (name,) = [name for name, count in scheduler.instances().items() if count]
    lost = scheduler.handle(InstanceGone(instance=name, reason="killed"))
    (again,) = [r for o in lost if isinstance(o, Submit) for r in o.requests if not r.is_attempt]
    assert again.epoch == 1 and again.draft.tolist() == [10]


def test_a_leaving_instance_gets_none_and_goes_at_once():
    scheduler = machine(2, 2)
    scheduler.handle(ahead(10, 11))
    orders = scheduler.handle(InstanceLeaves(instance="a", reason="too many"))
    # its attempt is made elsewhere
    assert orders[0] == Left(instance="a", reason="too many") and attempts(orders) == {"b": [10]}


def test_reports_that_come_late_or_unasked_leave_no_trace():
    scheduler = machine(2)
    scheduler.handle(ahead(10, 11))
    one = only(scheduler.handle(asked(10)))
    assert one.draft is None
    stop = FinishReason.STOP
    for late in (came_of(10, "a", 1, 2), came_of(55, "a", 3), came_of(11, "x", reason=stop)):
        assert scheduler.handle(late) == []
    assert [type(o) for o in scheduler.handle(report("a", complete(one, "a")))] == [Deliver]
    assert scheduler.handle(came_of(10, "a", 5, reason=stop)) == [], "after delivery too"
    assert scheduler.num_delivered == 1 and scheduler.attempt_counts.num_drafts == 0
    without = Scheduler(heartbeat_timeout_s=10.0)
    without.handle(InstanceJoined(instance="a", num_slots=2, now_s=0.0))
    assert without.handle(came_of(10, "a", 5)) == []


def test_a_next_batch_takes_the_place_of_the_last_one_and_of_its_drafts():
    scheduler = machine(2)
    scheduler.handle(ahead(10, 11, 12))
    scheduler.handle(came_of(10, "a", 10, 11))
    orders = scheduler.handle(ahead(20, 21))
    assert attempts(orders) == {}, "11 and 12 still run"
    assert attempts(scheduler.handle(came_of(11, "a", 11))) == {"a": [20]}
    assert all(r.draft is None for o in scheduler.handle(asked(10, 11)) for r in o.requests)


def test_an_attempt_that_had_to_leave_is_not_made_again():
    scheduler = machine(2)
    scheduler.handle(ahead(10, 11))
    scheduler.handle(came_of(10, "a"))
    assert attempts(scheduler.handle(ClockTicked(now_s=1.0))) == {}
    assert only(scheduler.handle(asked(10))).draft is None


def test_where_a_sample_is_cut_only_what_it_has_is_compared():
    scheduler = machine(2)
    scheduler.handle(ahead(10))
    scheduler.handle(came_of(10, "a", 10, 11, 12, 13))
    one = only(scheduler.handle(asked(10)))
    scheduler.handle(Cut())
    cut = replace(complete(one, "a"), finish_reason=FinishReason.CUT)
    scheduler.handle(report("a", cut))
    assert scheduler.attempt_counts.num_proved_tokens == 3
    # what the law is told is all proved
    scheduler.handle(ahead())
    assert law().agreement < scheduler._attempts.law.agreement


def test_a_scheduler_that_starts_again_knows_none_and_takes_no_harm_from_them():
    held = replace(complete(request(11), "a"), epoch=ATTEMPT_EPOCH)
    snapshot = InstanceSnapshot(
        instance="a",
        num_slots=2,
        open_epochs={request(0).key: 0, request(10).key: ATTEMPT_EPOCH},
        completions=(held,),
    )
    scheduler, orders = Scheduler.rebuild(
        requests=[request(0), request(10), request(11)],
        delivered=[],
        snapshots=[snapshot],
        heartbeat_timeout_s=10.0,
        now_s=0.0,
        look_ahead=law(),
    )
    assert scheduler.members["a"].owned.keys() >= {request(0).key}
    assert [r.key.sample_index for o in orders for r in o.requests] == [10] and scheduler.num_waiting == 1
    scheduler.handle(report("a", *(complete(request(i), "a") for i in (0,))))
    assert scheduler.num_delivered == 1
    assert attempts(scheduler.handle(ahead(20))) == {}
