"""All open samples end where they are: each is delivered once, whoever held it, and whatever is lost meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from move_messages import complete, request

from rlhfspec.core.records import EPOCHS_OF_A_ROUND, Completion, FinishReason, SampleRequest
from rlhfspec.policies.migration.move_messages import Claim, MoveReport
from rlhfspec.policies.reallocation.pool_records import Move, MoveMode
from rlhfspec.policies.scheduling.events import (
    Abandon,
    Alarm,
    Cut,
    CutOwned,
    Deliver,
    InstanceGone,
    InstanceJoined,
    InstanceReported,
    SamplesArrived,
    StartMove,
    Submit,
)
from rlhfspec.policies.scheduling.scheduler import Scheduler


def cut_at(held: SampleRequest, instance: str, count: int) -> Completion:
    whole = complete(held, instance)
    return replace(
        whole,
        token_ids=np.arange(count),
        policy_logprobs=np.zeros(count, dtype=np.float32),
        sampling_logprobs=np.zeros(count, dtype=np.float32),
        finish_reason=FinishReason.CUT,
    )


def of(orders: list, kind: type) -> list:
    return [order for order in orders if isinstance(order, kind)]


def told(orders: list) -> list[tuple[str, set]]:
    return [(order.instance, set(order.keys)) for order in of(orders, CutOwned)]


def pool(*names: str, slots: int, samples: int) -> tuple[Scheduler, dict[str, list[SampleRequest]]]:
    scheduler = Scheduler(heartbeat_timeout_s=10.0)
    for name in names:
        scheduler.handle(InstanceJoined(instance=name, num_slots=slots, now_s=0.0))
    orders = scheduler.handle(SamplesArrived(requests=tuple(request(i) for i in range(samples))))
    held: dict[str, list[SampleRequest]] = {name: [] for name in names}
    for order in of(orders, Submit):
        held[order.instance] += order.requests
    return scheduler, held


def test_what_waits_is_delivered_at_once_and_what_decodes_is_cut_where_it_is():
    scheduler, held = pool("a", slots=2, samples=5)
    orders = scheduler.handle(Cut())
    assert [order.completion.num_tokens for order in of(orders, Deliver)] == [0] * (5 - len(held["a"]))
    assert told(orders) == [("a", {one.key for one in held["a"]})] and not of(orders, Submit)
    # told again with a report that it still holds some
    orders = scheduler.handle(InstanceReported(instance="a", now_s=1.0))
    assert told(orders) == [("a", {one.key for one in held["a"]})]
    ended = tuple(cut_at(one, "a", 3) for one in held["a"])
    orders = scheduler.handle(InstanceReported(instance="a", now_s=1.0, completions=ended))
    assert len(of(orders, Deliver)) == len(held["a"]) and not of(orders, CutOwned)
    assert not scheduler.num_open
    # the next phase is not cut
    turn = replace(request(1), key=replace(request(1).key, turn=1))
    assert of(scheduler.handle(SamplesArrived(requests=(turn,))), Submit)
    assert not of(scheduler.handle(InstanceReported(instance="a", now_s=2.0)), CutOwned)


def test_named_samples_alone_are_cut_and_others_take_their_slots():
    scheduler, held = pool("a", slots=2, samples=5)
    running, (waits, *_) = held["a"], [request(i) for i in range(len(held["a"]), 5)]
    keys = frozenset({running[0].key, waits.key})
    orders = scheduler.handle(Cut(keys=keys))
    assert [order.completion.key for order in of(orders, Deliver)] == [waits.key]
    assert told(orders) == [("a", {running[0].key})]
    ended = (cut_at(running[0], "a", 3),)
    orders = scheduler.handle(InstanceReported(instance="a", now_s=1.0, completions=ended))
    assert [order.completion.key for order in of(orders, Deliver)] == [running[0].key]
    assert [one.key for order in of(orders, Submit) for one in order.requests] and not of(orders, CutOwned)
    # a key that is asked for again is not cut
    turn = replace(waits, epoch=EPOCHS_OF_A_ROUND)
    scheduler.handle(SamplesArrived(requests=(turn,)))
    orders = scheduler.handle(InstanceReported(instance="a", now_s=2.0))
    assert not of(orders, CutOwned) and not of(orders, Deliver)


def test_samples_of_an_instance_that_is_lost_meanwhile_are_handed_back():
    scheduler, held = pool("a", "b", slots=2, samples=4)
    scheduler.handle(Cut())
    orders = scheduler.handle(InstanceGone(instance="a", reason="killed"))
    assert {order.completion.key for order in of(orders, Deliver)} == {one.key for one in held["a"]}
    late = tuple(cut_at(one, "a", 7) for one in held["a"])
    assert not of(scheduler.handle(InstanceReported(instance="a", now_s=1.0, completions=late)), Alarm)
    ended = tuple(cut_at(one, "b", 2) for one in held["b"])
    assert (
        len(of(scheduler.handle(InstanceReported(instance="b", now_s=1.0, completions=ended)), Deliver)) == 2
    )
    assert not scheduler.num_open


def test_a_sample_on_its_way_is_cut_where_it_comes_up():
    scheduler, held = pool("a", "b", slots=4, samples=2)
    (mine,) = held["a"]
    move = Move(key=mine.key, source="a", destination="b", mode=MoveMode.MIGRATE, gain_s=1.0, reason="test")
    (started,) = of(scheduler.move([move], now_s=0.5), StartMove)
    scheduler.handle(Cut())
    ended = tuple(cut_at(one, "b", 2) for one in held["b"])
    scheduler.handle(InstanceReported(instance="b", now_s=1.0, completions=ended))
    order = started.order
    commit = MoveReport(
        move_id=order.move_id,
        key=order.key,
        source="a",
        destination="b",
        claim=Claim.COMMIT,
        epoch=order.epoch + 1,
        reason="it runs here",
    )
    orders = scheduler.handle(InstanceReported(instance="b", now_s=2.0, moves=(commit,)))
    assert told(orders) == [("b", {order.key})]
    moved = cut_at(replace(mine, epoch=order.epoch + 1), "b", 5)
    assert of(scheduler.handle(InstanceReported(instance="b", now_s=3.0, completions=(moved,))), Deliver)
    assert not scheduler.num_open


@pytest.mark.parametrize("seed", range(40))
def test_every_sample_is_delivered_once_under_random_faults(seed):
    chance = random.Random(seed)
    scheduler, held = pool("a", "b", "c", slots=3, samples=chance.randint(1, 20))
    delivered, alarms, orders = [], [], []
    for turn in range(500):
        if turn == 5:
            orders = scheduler.handle(Cut())
        name = chance.choice("abc")
        action = chance.random()
        if name in held and action < 0.05 and len(held) > 1:
            orders += scheduler.handle(InstanceGone(instance=name, reason="killed"))
        elif name in held:
            ended = [held[name].pop() for _ in range(min(chance.randint(0, 2), len(held[name])))]
            done = tuple(
                cut_at(one, name, chance.randint(0, 4)) if turn > 5 else complete(one, name) for one in ended
            )
            orders += scheduler.handle(InstanceReported(instance=name, now_s=0.01 * turn, completions=done))
        for order in orders:
            match order:
                case Submit():
                    assert turn < 5, "nothing is given out once all is cut"
                    held[order.instance] += order.requests
                case Deliver():
                    delivered.append(order.completion.key)
                case Abandon():
                    held.pop(order.instance)
                case Alarm():
                    alarms.append(order)
        orders = []
    assert not scheduler.num_open and len(delivered) == len(set(delivered)) and not alarms
