"""The ledger: slots are never overbooked, binding, and what a rebuilt scheduler makes of open hand-overs."""

import itertools
from dataclasses import replace

import pytest
from move_messages import complete, move, report, request

from rlhfspec.core.decode_records import GenerationStats, InstanceLoad
from rlhfspec.policies.migration.move_messages import Claim, Settle
from rlhfspec.policies.scheduling.events import (
    Alarm,
    Deliver,
    InstanceGone,
    InstanceJoined,
    InstanceReported,
    InstanceSnapshot,
    SamplesArrived,
    SendVerdict,
    StartMove,
    Submit,
)
from rlhfspec.policies.scheduling.ledger import Binding
from rlhfspec.policies.scheduling.scheduler import Scheduler


def pool(
    slots: dict[str, int], count: int, binding: Binding = "pull"
) -> tuple[Scheduler, dict[str, list[int]]]:
    """A scheduler of these instances; which samples each was given."""
    scheduler = Scheduler(heartbeat_timeout_s=10.0, binding=binding)
    orders = []
    for name, num_slots in slots.items():
        orders += scheduler.handle(InstanceJoined(instance=name, num_slots=num_slots, now_s=0.0))
    orders += scheduler.handle(SamplesArrived(requests=tuple(request(i) for i in range(count))))
    return scheduler, given(orders)


def given(orders) -> dict[str, list[int]]:
    return {
        order.instance: [asked.key.sample_index for asked in order.requests]
        for order in orders
        if isinstance(order, Submit)
    }


def key(index: int):
    return request(index).key


def committed(index: int, move_id: str, epoch: int = 1, source="a", destination="b") -> InstanceReported:
    claim = report(
        Claim.COMMIT, epoch=epoch, key=key(index), move_id=move_id, source=source, destination=destination
    )
    return InstanceReported(instance=destination, now_s=1.0, moves=(claim,))


def finished(index: int, instance: str, epoch: int = 0) -> InstanceReported:
    done = complete(replace(request(index), epoch=epoch), instance)
    return InstanceReported(instance=instance, now_s=1.0, completions=(done,))


def test_a_slot_that_an_arriving_sample_will_take_is_given_to_no_other():
    scheduler, bound = pool({"a": 2}, 4)
    assert bound == {"a": [0, 1]}
    # b joins with one slot, and a waiting sample takes it at once; when it is done, another waits
    assert given(scheduler.handle(InstanceJoined(instance="b", num_slots=1, now_s=0.0))) == {"b": [2]}
    assert scheduler.move([move(key(0))], now_s=0.0) == [], "b is full"
    assert given(scheduler.handle(finished(2, "b"))) == {"b": [3]}
    scheduler.handle(finished(3, "b"))
    assert len(scheduler.move([move(key(0)), move(key(1))], now_s=0.0)) == 1, "one slot, one move"
    late = scheduler.handle(SamplesArrived(requests=(request(4),)))
    assert given(late) == {}, "b's only slot is reserved for the sample on its way"
    assert given(scheduler.handle(committed(0, "0-0"))) == {"a": [4]}, "its old slot is free now"
    assert scheduler.instances() == {"a": 2, "b": 1}


@pytest.mark.parametrize("claim", [Claim.KEPT, Claim.TAKE_BACK])
def test_a_slot_reserved_for_a_move_that_failed_is_free_again(claim):
    scheduler, _ = pool({"a": 1}, 1)
    scheduler.handle(InstanceJoined(instance="b", num_slots=1, now_s=0.0))
    scheduler.move([move(key(0))], now_s=0.0)
    assert given(scheduler.handle(SamplesArrived(requests=(request(1),)))) == {}
    answer = report(claim, key=key(0))
    orders = scheduler.handle(InstanceReported(instance="a", now_s=1.0, moves=(answer,)))
    assert given(orders) == {"b": [1]}


def test_a_slot_reserved_for_a_sample_that_finished_before_it_left_is_free_again():
    scheduler, _ = pool({"a": 1}, 1)
    scheduler.handle(InstanceJoined(instance="b", num_slots=1, now_s=0.0))
    scheduler.move([move(key(0))], now_s=0.0)
    scheduler.handle(SamplesArrived(requests=(request(1), request(2))))
    assert given(scheduler.handle(finished(0, "a"))) == {"a": [1], "b": [2]}


@pytest.mark.parametrize(
    "wrong",
    [
        move(key(99)),
        move(key(0), source="b", destination="a"),
        move(key(0), destination="a"),
        move(key(0), destination="nobody"),
    ],
    ids=["unknown sample", "wrong owner", "to itself", "to nobody"],
)
def test_a_move_that_is_not_possible_is_left_out(wrong):
    scheduler, _ = pool({"a": 1}, 1)
    scheduler.handle(InstanceJoined(instance="b", num_slots=1, now_s=0.0))
    assert scheduler.move([wrong], now_s=0.0) == []
    (order,) = scheduler.move([wrong, move(key(0))], now_s=0.0)
    assert isinstance(order, StartMove)


def test_static_binding_gives_the_ith_sample_to_the_ith_instance_however_full_it_is():
    _, bound = pool({"b": 1, "a": 1}, 7, binding="static")
    assert bound == {"a": [0, 2, 4, 6], "b": [1, 3, 5]}


def test_static_binding_gives_a_lost_instances_samples_to_the_one_that_owns_fewest():
    scheduler, _ = pool({"a": 1, "b": 1, "c": 1}, 6, binding="static")
    scheduler.handle(finished(2, "c"))
    orders = scheduler.handle(InstanceGone(instance="a", reason="killed"))
    assert given(orders) == {"c": [0], "b": [3]} and scheduler.num_waiting == 0


def test_a_few_wait_at_the_instance_while_the_line_is_long():
    _, bound = pool({"a": 8, "b": 8}, 40)
    assert {name: len(samples) for name, samples in bound.items()} == {"a": 10, "b": 10}
    assert bound["a"][:8] == list(range(0, 16, 2)), "oldest first, in turn"


def test_the_end_of_the_line_waits_for_a_free_slot():
    for count, owned in ((16, 16), (19, 16), (20, 17), (24, 18), (30, 20)):
        scheduler, _ = pool({"a": 8, "b": 8}, count)
        assert sum(scheduler.instances().values()) == owned, f"{count} samples"
    scheduler, _ = pool({"a": 3}, 40)
    assert scheduler.instances() == {"a": 3}, "a fourth of three slots is none"


def test_static_binding_moves_samples_only_into_slots_that_nobody_owns():
    scheduler, _ = pool({"a": 2, "b": 2}, 4, binding="static")
    assert scheduler.move([move(key(0))], now_s=0.0) == []
    scheduler.handle(finished(1, "b"))
    assert len(scheduler.move([move(key(0)), move(key(2))], now_s=0.0)) == 1


# -- rebuilding with open hand-overs ---------------------------------------------------------------------------

HELD_BY_B = ("nothing", "running", "finished")


def rebuilt(snapshots, *, delivered=(), count: int = 1):
    return Scheduler.rebuild(
        requests=[request(i) for i in range(count)],
        delivered=delivered,
        snapshots=snapshots,
        heartbeat_timeout_s=10.0,
        now_s=0.0,
        term=1,
    )


def snapshot(
    name: str,
    *,
    open_epoch: int | None = None,
    done_epoch: int | None = None,
    aside_epoch: int | None = None,
    move_id: str = "0-0",
) -> InstanceSnapshot:
    asked = request(0)
    done = () if done_epoch is None else (complete(replace(asked, epoch=done_epoch), name),)
    return InstanceSnapshot(
        instance=name,
        num_slots=2,
        open_epochs={} if open_epoch is None else {asked.key: open_epoch},
        completions=done,
        set_aside={} if aside_epoch is None else {asked.key: (move_id, aside_epoch)},
    )


def verdicts(orders) -> dict[str, tuple[str, int]]:
    return {
        order.instance: (str(order.verdict.verdict), order.verdict.epoch)
        for order in orders
        if isinstance(order, SendVerdict) and isinstance(order.verdict, Settle)
    }


@pytest.mark.parametrize("base", [0, 3])
@pytest.mark.parametrize("at_b", HELD_BY_B)
@pytest.mark.parametrize("b_is_alive", [True, False])
def test_every_hand_over_that_a_dead_scheduler_left_open(base, at_b, b_is_alive):
    """The source set the sample aside under epoch `base`; the destination may run it under the next."""
    source = snapshot("a", aside_epoch=base)
    destination = snapshot(
        "b",
        open_epoch=base + 1 if at_b == "running" else None,
        done_epoch=base + 1 if at_b == "finished" else None,
    )
    scheduler, orders = rebuilt([source, destination] if b_is_alive else [source])
    has_copy = b_is_alive and at_b != "nothing"
    delivered = [order for order in orders if isinstance(order, Deliver)]
    assert len(delivered) == (b_is_alive and at_b == "finished")
    verdict, epoch = verdicts(orders)["a"]
    assert verdict == ("release" if has_copy else "own")
    assert not any(isinstance(order, (Submit, Alarm)) for order in orders)
    if delivered:
        return
    (sample,) = scheduler.open_samples()
    assert (sample.owner, sample.request.epoch) == (("b", base + 1) if has_copy else ("a", base + 2))
    assert epoch == sample.request.epoch
    # what either says again is answered the same way
    asks = report(Claim.TAKE_BACK, epoch=base, key=key(0))
    again = scheduler.handle(InstanceReported(instance="a", now_s=1.0, moves=(asks,)))
    assert verdicts(again) == {"a": (verdict, epoch)}
    if b_is_alive:
        claims = report(Claim.COMMIT, epoch=base + 1, key=key(0))
        told = verdicts(scheduler.handle(InstanceReported(instance="b", now_s=1.0, moves=(claims,))))
        assert told["b"][0] == ("own" if has_copy else "release")


@pytest.mark.parametrize("back_at_a", ["running", "finished"])
def test_a_sample_that_came_back_to_where_an_old_copy_is_set_aside_is_not_taken_up_twice(back_at_a):
    is_running = back_at_a == "running"
    at_a = snapshot(
        "a", aside_epoch=0, open_epoch=2 if is_running else None, done_epoch=None if is_running else 2
    )
    scheduler, orders = rebuilt([at_a, snapshot("b")])
    assert verdicts(orders)["a"][0] == "release"
    assert scheduler.num_open == is_running


def test_of_two_copies_set_aside_the_newer_one_is_taken_up():
    """a handed it to b (epoch 0), b handed it to c (epoch 1); c died with it."""
    source, second = snapshot("a", aside_epoch=0), snapshot("b", aside_epoch=1, move_id="0-1")
    for snapshots in ([source, second], [second, source]):
        scheduler, orders = rebuilt(snapshots)
        assert verdicts(orders) == {"a": ("release", 3), "b": ("own", 3)}
        assert scheduler.instances() == {"a": 0, "b": 1}


def test_a_copy_set_aside_of_a_sample_already_delivered_is_released():
    done = complete(replace(request(0), epoch=1), "b")
    scheduler, orders = rebuilt([snapshot("a", aside_epoch=0)], delivered=[done])
    assert verdicts(orders)["a"][0] == "release" and scheduler.num_open == 0


def test_without_any_trace_a_sample_starts_again_under_a_new_epoch():
    scheduler, orders = rebuilt([snapshot("a"), snapshot("b")])
    (submit,) = [order for order in orders if isinstance(order, Submit)]
    assert submit.requests[0].epoch == 1 and scheduler.num_open == 1


@pytest.mark.parametrize("epoch", range(4))
@pytest.mark.parametrize(("claim", "claimant"), [(Claim.COMMIT, "b"), (Claim.TAKE_BACK, "a")])
def test_a_claim_of_a_move_before_the_scheduler_wins_no_sample_that_started_again(claim, claimant, epoch):
    """b ran a copy to its end that was nobody's, and asks still; the sample's last owner died with the scheduler."""
    scheduler, _ = rebuilt([snapshot("a"), snapshot("b")])
    before = {sample.owner: sample.request.epoch for sample in scheduler.open_samples()}
    for move_id in ("0-0", "0-12"):
        told = report(claim, epoch=epoch, key=key(0), move_id=move_id, source="a", destination="b")
        scheduler.handle(InstanceReported(instance=claimant, now_s=1.0, moves=(told,)))
    assert {sample.owner: sample.request.epoch for sample in scheduler.open_samples()} == before


def test_a_denial_tells_the_owners_epoch_so_that_a_late_one_drops_no_owned_copy():
    """a ran a copy under epoch 5 to its end before the scheduler died, and was given the sample anew."""
    scheduler, _ = rebuilt([snapshot("a"), snapshot("b")])
    ((owner, epoch),) = [(sample.owner, sample.request.epoch) for sample in scheduler.open_samples()]
    assert owner == "a" and epoch < 5
    told = scheduler.handle(committed(0, "0-7", epoch=5, source="b", destination="a"))
    assert verdicts(told) == {"a": ("release", epoch)}


def test_whatever_the_instances_hold_a_rebuilt_scheduler_has_one_owner_and_no_lower_epoch():
    held = [None, 0, 1, 2]
    for a_open, a_aside, b_open, b_aside in itertools.product(held, repeat=4):
        scheduler, _ = rebuilt(
            [
                snapshot("a", open_epoch=a_open, aside_epoch=a_aside, move_id="0-0"),
                snapshot("b", open_epoch=b_open, aside_epoch=b_aside, move_id="0-1"),
            ]
        )
        (sample,) = scheduler.open_samples()
        newest = max((e for e in (a_open, a_aside, b_open, b_aside) if e is not None), default=0)
        assert sample.request.epoch >= newest
        assert sum(scheduler.instances().values()) == 1 and sample.owner is not None
        is_running_there = sample.request.epoch == {"a": a_open, "b": b_open}[sample.owner]
        assert sample.request.epoch > newest or is_running_there


def test_an_instance_whose_caches_are_full_gets_no_more_samples_and_no_moves():
    """It has sixteen slots, and its last load says that three samples have room."""
    load = InstanceLoad(
        instance="b",
        num_running=2,
        num_waiting=0,
        num_free_slots=1,
        context_tokens=0,
        weight_version=0,
        drafter_version=0,
        decode_step=1,
        goodput_tokens_per_s=0.0,
        stats=GenerationStats(),
        num_slots=3,
    )
    scheduler, bound = pool({"a": 2}, 2)
    scheduler.handle(InstanceJoined(instance="b", num_slots=16, now_s=0.0))
    scheduler.handle(InstanceReported(instance="b", now_s=1.0, load=load))
    arrived = SamplesArrived(requests=tuple(request(i) for i in range(2, 5)))
    assert bound == {"a": [0, 1]} and given(scheduler.handle(arrived)) == {"b": [2, 3, 4]}
    assert scheduler.move([move(key(0))], now_s=1.0) == [], "no room at b"
    scheduler.handle(InstanceReported(instance="b", now_s=2.0, load=replace(load, num_slots=4)))
    assert len(scheduler.move([move(key(0)), move(key(1))], now_s=2.0)) == 1
