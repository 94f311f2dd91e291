"""Laws of leaving: no new samples, what it has moves away where there is room, let go when empty, nothing lost."""

from forced_moves import Forced
from move_messages import complete, request
from pool_views import cpu_curve

from rlhfspec.policies.reallocation.pool_records import MoveMode
from rlhfspec.policies.scaling.scaling_policy import ScalingPolicy
from rlhfspec.policies.scaling.scaling_records import Limits, Starts
from rlhfspec.policies.scheduling.events import (
    Abandon,
    Deliver,
    InstanceGone,
    InstanceJoined,
    InstanceLeaves,
    InstanceReported,
    Left,
    Resized,
    SamplesArrived,
    StartMove,
    Submit,
)
from rlhfspec.policies.scheduling.scheduler import Scheduler


def pool(*slots: int, **settings) -> Scheduler:
    still = Forced(share=0.0)
    machine = Scheduler(heartbeat_timeout_s=10.0, reallocation=still, **settings)
    for number, count in enumerate(slots):
        machine.handle(InstanceJoined(instance=f"gen-{number}", num_slots=count, now_s=0.0))
    return machine


def arrive(machine: Scheduler, first: int, count: int) -> list[Submit]:
    orders = machine.handle(SamplesArrived(requests=tuple(request(first + i) for i in range(count))))
    return [order for order in orders if isinstance(order, Submit)]


def leave(machine: Scheduler, name: str) -> list:
    return machine.handle(InstanceLeaves(instance=name, reason="its node ends in 60 s"))


def test_a_leaving_instance_gets_nothing_new_and_its_samples_move_to_free_slots_only():
    machine = pool(4, 3)
    arrive(machine, 0, 6)
    begun = next(iter(sorted(machine.members["gen-0"].owned, key=lambda key: key.sample_index)))
    machine.handle(InstanceReported(instance="gen-0", now_s=0.1, progress={begun: 7}))
    assert leave(machine, "gen-0") == []
    assert not arrive(machine, 6, 1) or machine.members["gen-1"].owned
    moves = [order.order for order in machine.reallocate(0.2) if isinstance(order, StartMove)]
    assert len(machine.members["gen-1"].owned) == 3 and not moves, "there is no free slot"
    machine.handle(InstanceJoined(instance="gen-2", num_slots=2, now_s=0.3))
    machine.reallocate(0.3)
    on_the_way = [machine.moves.of(key) for key in machine.members["gen-0"].owned]
    moved = [order for order in on_the_way if order is not None]
    assert all(order.destination == "gen-2" and order.source == "gen-0" for order in moved)
    # a queued sample took one of its two slots
    assert len(moved) + len(machine.members["gen-2"].owned) == 2
    modes = {order.key: order.mode for order in moved}
    assert modes.get(begun, MoveMode.MIGRATE) is MoveMode.MIGRATE


def test_an_instance_is_let_go_once_and_only_when_it_holds_nothing():
    machine = pool(1, 1)
    submits = arrive(machine, 0, 2)
    mine = next(order.requests[0] for order in submits if order.instance == "gen-0")
    assert leave(machine, "gen-0") == []
    done = machine.handle(
        InstanceReported(instance="gen-0", now_s=1.0, completions=(complete(mine, "gen-0"),))
    )
    assert [type(order) for order in done] == [Deliver, Left]
    assert list(machine.members.serving) == ["gen-1"]
    assert machine.handle(InstanceGone(instance="gen-0", reason="ended")) == []


def test_the_last_instance_goes_on_until_another_has_joined():
    machine = pool(2)
    leave(machine, "gen-0")
    assert [order.instance for order in arrive(machine, 0, 2)] == ["gen-0"]
    assert not [order for order in machine.reallocate(1.0) if isinstance(order, StartMove | Left)]
    machine.handle(InstanceJoined(instance="gen-1", num_slots=2, now_s=1.0))
    orders = machine.reallocate(1.1)
    assert {order.order.destination for order in orders if isinstance(order, StartMove)} == {"gen-1"}


def test_a_leaving_instance_that_dies_has_its_samples_queued_again():
    machine = pool(1, 1)
    arrive(machine, 0, 2)
    leave(machine, "gen-0")
    orders = machine.handle(InstanceGone(instance="gen-0", reason="its machine died"))
    assert Abandon(instance="gen-0", reason="its machine died", num_requeued=1) in orders
    assert machine.num_waiting == 1 and machine.num_open == 2


def test_the_policys_decision_empties_who_it_names():
    scaling = ScalingPolicy(cpu_curve(), Limits(least=1, most=2, idle_timeout_s=5.0))
    assert pool(scaling=scaling).reallocate(1.0) == [], "before the first has joined nothing is decided"
    machine = pool(4, 4, scaling=scaling)
    machine.expect(Starts(), ("gen-1",))
    assert not [order for order in machine.reallocate(1.0) if isinstance(order, Resized | Left)]
    machine.reallocate(4.0)
    orders = machine.reallocate(6.5)
    assert [type(order) for order in orders] == [Resized, Left] and orders[1].instance == "gen-1"
    assert list(machine.members.admitting) == ["gen-0"]
