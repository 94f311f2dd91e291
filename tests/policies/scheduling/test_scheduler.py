"""Laws of the scheduler: exactly once, pull, epochs, alarms, replay, rebuild. No Ray here."""

import random
from dataclasses import replace

import numpy as np
import pytest
from move_messages import complete, request

from rlhfspec.core.decode_records import GenerationStats, InstanceLoad
from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.core.records import EPOCHS_OF_A_ROUND, Completion, SampleKey, SampleRequest
from rlhfspec.policies.scheduling.accepted import Accepted
from rlhfspec.policies.scheduling.events import (
    Abandon,
    Alarm,
    ClockTicked,
    Deliver,
    InstanceGone,
    InstanceJoined,
    InstanceReported,
    InstanceSnapshot,
    SamplesArrived,
    Submit,
)
from rlhfspec.policies.scheduling.members import KEPT_GONE, InstanceState
from rlhfspec.policies.scheduling.scheduler import Scheduler


def arrived(count: int) -> SamplesArrived:
    return SamplesArrived(requests=tuple(request(i) for i in range(count)))


def joined(name: str, slots: int = 2, now_s: float = 0.0) -> InstanceJoined:
    return InstanceJoined(instance=name, num_slots=slots, now_s=now_s)


def report(name: str, *completions: Completion, now_s: float = 0.0) -> InstanceReported:
    return InstanceReported(instance=name, now_s=now_s, completions=completions)


def submitted(orders) -> dict[str, list[SampleRequest]]:
    return {o.instance: list(o.requests) for o in orders if isinstance(o, Submit)}


def indices(requests) -> list[int]:
    return [r.key.sample_index for r in requests]


def machine() -> Scheduler:
    return Scheduler(heartbeat_timeout_s=10.0)


def test_of_instances_that_are_gone_the_last_are_kept():
    scheduler = machine()
    scheduler.handle(joined("old"))
    for number in range(3 * KEPT_GONE):
        scheduler.handle(joined(f"gen-{number}", now_s=0.1 * number))
        scheduler.handle(report("old", now_s=0.1 * number))
        scheduler.handle(InstanceGone(instance=f"gen-{number}", reason="died"))
    scheduler.handle(InstanceGone(instance="old", reason="died"))
    scheduler.handle(joined("last", now_s=10.0))
    last = range(2 * KEPT_GONE + 1, 3 * KEPT_GONE)
    assert set(scheduler.members) == {"old", "last", *(f"gen-{number}" for number in last)}


def test_what_was_delivered_long_ago_is_forgotten_and_no_late_copy_of_it_is_an_alarm():
    scheduler = machine()
    scheduler._accepted = Accepted(most=4)
    scheduler.handle(joined("a", 100))
    for first in (0, 8, 16):
        scheduler.handle(SamplesArrived(requests=tuple(request(i) for i in range(first, first + 8))))
        orders = scheduler.handle(report("a", *(complete(request(i), "a") for i in range(first, first + 8))))
        assert len([order for order in orders if isinstance(order, Deliver)]) == 8
    # within the last asking all are kept: 4 of the one before, and 8
    assert len(scheduler._accepted.keys()) == 12 and scheduler.num_delivered == 24
    assert scheduler.handle(report("a", complete(request(3), "a"))) == [], "no alarm, not delivered twice"
    (alarm,) = scheduler.handle(report("a", complete(request(99), "a")))
    assert isinstance(alarm, Alarm) and alarm.what == "a sample nobody asked for"


def test_waiting_samples_are_bound_only_to_free_slots_and_evenly():
    scheduler = machine()
    scheduler.handle(joined("a", 2))
    scheduler.handle(joined("b", 3))
    orders = submitted(scheduler.handle(arrived(7)))
    assert indices(orders["a"]) == [0, 2] and indices(orders["b"]) == [1, 3, 4]
    assert scheduler.num_waiting == 2


def test_a_slot_that_frees_pulls_the_oldest_waiting_sample():
    scheduler = machine()
    scheduler.handle(joined("a", 1))
    first = submitted(scheduler.handle(arrived(3)))["a"][0]
    orders = scheduler.handle(report("a", complete(first, "a")))
    assert isinstance(orders[0], Deliver)
    assert indices(submitted(orders)["a"]) == [1]


def test_lost_samples_go_to_the_front_under_a_higher_epoch():
    scheduler = machine()
    scheduler.handle(joined("a", 2))
    scheduler.handle(arrived(4))
    orders = scheduler.handle(InstanceGone(instance="a", reason="killed"))
    assert orders == [Abandon(instance="a", reason="killed", num_requeued=2)]
    again = submitted(scheduler.handle(joined("a2", 3)))["a2"]
    assert [(r.key.sample_index, r.epoch) for r in again] == [(0, 1), (1, 1), (2, 0)]


def test_a_lost_instance_is_no_longer_among_those_that_serve_and_its_statistics_stay():
    scheduler = machine()
    for name in ("a", "b"):
        scheduler.handle(joined(name))
    load = InstanceLoad(
        instance="a",
        num_running=1,
        num_waiting=0,
        num_free_slots=1,
        context_tokens=3,
        weight_version=0,
        drafter_version=0,
        decode_step=4,
        goodput_tokens_per_s=0.0,
        stats=GenerationStats(num_emitted_tokens=40),
    )
    scheduler.handle(InstanceReported(instance="a", now_s=0.0, load=load))
    scheduler.handle(InstanceGone(instance="a", reason="killed"))
    assert list(scheduler.instances()) == list(scheduler.members.serving) == ["b"]
    assert scheduler.members["a"].state is InstanceState.GONE and not scheduler.members["a"].owned
    assert scheduler.members.stats == {"a": load.stats}
    with pytest.raises(RlhfSpecError, match="a replacement needs a new name"):
        scheduler.handle(joined("a"))


def test_losing_an_unknown_or_already_lost_instance_changes_nothing():
    scheduler = machine()
    assert scheduler.handle(InstanceGone(instance="ghost", reason="?")) == []


def test_a_stale_equal_report_is_dropped_before_and_after_acceptance():
    scheduler = machine()
    scheduler.handle(joined("a", 1))
    old = submitted(scheduler.handle(arrived(1)))["a"][0]
    scheduler.handle(InstanceGone(instance="a", reason="partition"))
    new = submitted(scheduler.handle(joined("b", 1)))["b"][0]
    assert scheduler.handle(report("a", complete(old, "a"))) == []
    orders = scheduler.handle(report("b", complete(new, "b")))
    assert [type(o) for o in orders] == [Deliver]
    assert scheduler.handle(report("a", complete(old, "a"))) == []
    assert scheduler.num_delivered == 1 and scheduler.num_open == 0


@pytest.mark.parametrize("stale_first", [True, False])
def test_a_stale_report_that_differs_raises_the_integrity_alarm(stale_first):
    scheduler = machine()
    scheduler.handle(joined("a", 1))
    old = submitted(scheduler.handle(arrived(1)))["a"][0]
    scheduler.handle(InstanceGone(instance="a", reason="partition"))
    new = submitted(scheduler.handle(joined("b", 1)))["b"][0]
    reports = [report("a", complete(old, "a", token=99)), report("b", complete(new, "b"))]
    orders = [o for r in (reports if stale_first else reports[::-1]) for o in scheduler.handle(r)]
    delivered = [o.completion.instance for o in orders if isinstance(o, Deliver)]
    alarms = [o for o in orders if isinstance(o, Alarm)]
    assert delivered == ["b"]
    assert len(alarms) == 1 and alarms[0].instance == "a" and alarms[0].epoch == 0


def test_logprobs_that_differ_raise_the_alarm_too():
    scheduler = machine()
    scheduler.handle(joined("a", 1))
    req = submitted(scheduler.handle(arrived(1)))["a"][0]
    good = complete(req, "a")
    scheduler.handle(report("a", good))
    names = Completion.__dataclass_fields__
    fields = {n: getattr(good, n) for n in names} | {"policy_logprobs": good.policy_logprobs * 2}
    orders = scheduler.handle(report("a", Completion(**fields)))
    assert [type(o) for o in orders] == [Alarm]


def test_a_report_from_a_wrong_owner_or_a_future_epoch_is_an_alarm_and_not_accepted():
    scheduler = machine()
    scheduler.handle(joined("a", 1))
    req = submitted(scheduler.handle(arrived(1)))["a"][0]
    wrong_owner = scheduler.handle(report("z", complete(req, "z")))
    future = SampleRequest(key=req.key, prompt=req.prompt, sampling=req.sampling, epoch=5)
    wrong_epoch = scheduler.handle(report("a", complete(future, "a")))
    assert [type(o) for o in wrong_owner + wrong_epoch] == [Alarm, Alarm]
    assert scheduler.num_open == 1


def test_a_repeated_report_delivers_once():
    scheduler = machine()
    scheduler.handle(joined("a", 1))
    req = submitted(scheduler.handle(arrived(1)))["a"][0]
    first = scheduler.handle(report("a", complete(req, "a")))
    again = scheduler.handle(report("a", complete(req, "a")))
    assert len(first) == 1 and again == []


def ticked(scheduler: Scheduler, begin_s: float, end_s: float) -> list:
    """Tick four times a second, as often as a waking scheduler does at least."""
    times = np.arange(begin_s, end_s + 0.125, 0.25)
    return [order for now_s in times for order in scheduler.handle(ClockTicked(now_s=float(now_s)))]


def abandoned(orders) -> list[tuple[str, int]]:
    return [(o.instance, o.num_requeued) for o in orders if isinstance(o, Abandon)]


def test_an_instance_is_lost_after_the_heartbeat_timeout_only():
    scheduler = machine()
    scheduler.handle(joined("quiet", 1, now_s=0.0))
    scheduler.handle(joined("alive", 1, now_s=0.0))
    scheduler.handle(arrived(2))
    assert ticked(scheduler, 0.0, 9.0) == []
    scheduler.handle(report("alive", now_s=9.0))
    assert ticked(scheduler, 9.0, 10.0) == []
    assert abandoned(scheduler.handle(ClockTicked(now_s=10.5))) == [("quiet", 1)]
    assert list(scheduler.instances()) == ["alive"]


@pytest.mark.parametrize("slept_s", [5.0, 90.0, 3600.0])
def test_a_paused_scheduler_loses_no_instance_before_hearing_from_it(slept_s):
    scheduler = machine()
    for name in ("gen-0", "gen-1"):
        scheduler.handle(joined(name, 1, now_s=0.0))
    scheduler.handle(arrived(2))
    assert ticked(scheduler, 0.0, 4.0) == []
    woken_s = 4.0 + slept_s
    # it looks at the clock before it has read a single answer, and goes on for a while without one
    assert ticked(scheduler, woken_s, woken_s + 3.0) == []
    scheduler.handle(report("gen-0", now_s=woken_s + 3.0))
    # whoever stays silent is still found out, by the time that both were awake
    assert abandoned(ticked(scheduler, woken_s + 3.0, woken_s + 8.0)) == [("gen-1", 1)]


def test_a_report_may_be_the_first_event_after_a_pause():
    scheduler = machine()
    for name in ("gen-0", "gen-1"):
        scheduler.handle(joined(name, 1, now_s=0.0))
    scheduler.handle(report("gen-0", now_s=90.0))
    assert scheduler.handle(ClockTicked(now_s=90.1)) == [] and len(scheduler.instances()) == 2


def test_an_instance_whose_step_hangs_is_lost_though_it_answers_polls():
    scheduler = machine()
    scheduler.handle(joined("gen-0", 1, now_s=0.0))
    scheduler.handle(arrived(1))
    orders = []
    for second in range(12):
        hanging = InstanceReported(instance="gen-0", now_s=float(second), boundary=7, busy_s=float(second))
        orders += scheduler.handle(hanging)
    assert abandoned(orders) == [("gen-0", 1)]
    assert "its decode step 7 has been running for 11 s" in str(orders)


def test_a_step_paused_along_with_the_scheduler_does_not_count_as_hung():
    scheduler = machine()
    scheduler.handle(joined("gen-0", 1, now_s=0.0))
    scheduler.handle(InstanceReported(instance="gen-0", now_s=1.0, boundary=7, busy_s=0.5))
    # the whole machine was stopped for 90 s: the instance's own clock says so, and the scheduler's as well
    stopped = InstanceReported(instance="gen-0", now_s=91.0, boundary=7, busy_s=90.5)
    assert scheduler.handle(stopped) == [] and list(scheduler.instances()) == ["gen-0"]


def test_the_log_holds_epoch_owner_and_number_of_tokens_at_the_last_poll():
    scheduler = machine()
    scheduler.handle(joined("a", 1))
    req = submitted(scheduler.handle(arrived(1)))["a"][0]
    scheduler.handle(InstanceReported(instance="a", now_s=1.0, progress={req.key: 2}))
    (line,) = scheduler.open_samples()
    assert line.owner == "a" and line.request.epoch == 0 and line.num_tokens == 2
    scheduler.handle(InstanceGone(instance="a", reason="killed"))
    (line,) = scheduler.open_samples()
    assert line.owner is None and line.request.epoch == 1 and line.num_tokens == 0


def test_a_sample_handed_over_twice_is_refused():
    scheduler = machine()
    scheduler.handle(arrived(1))
    with pytest.raises(RlhfSpecError, match="twice"):
        scheduler.handle(arrived(1))


def again(index: int, round_number: int) -> SampleRequest:
    return replace(request(index), epoch=round_number * EPOCHS_OF_A_ROUND)


def test_a_delivered_sample_may_be_asked_for_again_under_higher_epochs_and_is_delivered_again():
    scheduler = machine()
    scheduler.handle(joined("a"))
    scheduler.handle(SamplesArrived(requests=(request(0),)))
    first = complete(request(0), "a")
    scheduler.handle(report("a", first))
    orders = submitted(scheduler.handle(SamplesArrived(requests=(again(0, 1),))))
    (asked,) = orders["a"]
    assert asked.epoch == EPOCHS_OF_A_ROUND
    # a late copy of the first asking, of other weights, is neither taken nor an alarm
    assert scheduler.handle(report("a", first)) == []
    other = replace(complete(asked, "a"), token_ids=np.array([9, 9, 9]))
    assert [type(order) for order in scheduler.handle(report("a", other))] == [Deliver]
    assert scheduler.handle(report("a", first)) == []
    with pytest.raises(RlhfSpecError, match="twice"):
        scheduler.handle(SamplesArrived(requests=(again(0, 1),)))


def test_a_sample_that_is_still_open_may_not_be_asked_for_again():
    scheduler = machine()
    scheduler.handle(SamplesArrived(requests=(request(0),)))
    with pytest.raises(RlhfSpecError, match="twice"):
        scheduler.handle(SamplesArrived(requests=(again(0, 1),)))


def test_a_rebuild_takes_nothing_of_an_earlier_asking():
    old = complete(request(0), "a")
    snapshot = InstanceSnapshot(instance="a", num_slots=1, open_epochs={}, completions=(old,))
    scheduler, orders = Scheduler.rebuild(
        requests=[again(0, 1)], delivered=[], snapshots=[snapshot], heartbeat_timeout_s=1.0, now_s=0.0
    )
    ((_, (asked,)),) = submitted(orders).items()
    assert len(orders) == 1 and asked.epoch > EPOCHS_OF_A_ROUND and scheduler.num_open == 1


def test_an_instance_name_is_used_by_one_living_instance():
    scheduler = machine()
    scheduler.handle(joined("a"))
    with pytest.raises(RlhfSpecError, match="joined twice"):
        scheduler.handle(joined("a"))


class Pool:
    """Random instances around a scheduler: finish, die, answer late, answer twice, stay silent."""

    def __init__(self, seed: int, num_samples: int) -> None:
        self.random = random.Random(seed)
        self.scheduler = machine()
        self.events: list = []
        self.delivered: dict[SampleKey, Completion] = {}
        self.alarms: list[Alarm] = []
        self.holds: dict[str, list[SampleRequest]] = {}
        self.zombies: dict[str, list[SampleRequest]] = {}
        self.reported: list[tuple[str, Completion]] = []
        self.num_names = 0
        self.now_s = 0.0
        self.num_samples = num_samples

    def feed(self, event) -> None:
        self.events.append(event)
        self.carry_out(self.scheduler.handle(event))

    def carry_out(self, orders) -> None:
        for order in orders:
            match order:
                case Submit():
                    self.holds[order.instance] += order.requests
                case Deliver():
                    assert order.completion.key not in self.delivered
                    self.delivered[order.completion.key] = order.completion
                case Abandon():
                    self.zombies[order.instance] = self.holds.pop(order.instance)
                case Alarm():
                    self.alarms.append(order)

    def join(self) -> None:
        name = f"gen-{self.num_names}"
        self.num_names += 1
        self.holds[name] = []
        self.feed(joined(name, self.random.randint(1, 4), self.now_s))

    def turn(self) -> None:
        self.now_s += self.random.random()
        action = self.random.random()
        name = self.random.choice(sorted(self.holds)) if self.holds else None
        if name is None or (action < 0.03 and len(self.holds) < 4):
            self.join()
        elif action < 0.06:
            self.feed(InstanceGone(instance=name, reason="killed"))
        elif action < 0.12:
            self.feed(ClockTicked(now_s=self.now_s))
        elif action < 0.20 and self.zombies:
            late = self.random.choice(sorted(self.zombies))
            self.feed(report(late, *[complete(r, late) for r in self.zombies[late]], now_s=self.now_s))
        elif action < 0.25 and self.reported:
            late, completion = self.random.choice(self.reported)
            self.feed(report(late, completion, now_s=self.now_s))
        else:
            self.finish_some(name)

    def finish_some(self, name: str) -> None:
        held = self.holds[name]
        done = [held.pop(self.random.randrange(len(held))) for _ in range(min(2, len(held)))]
        completions = [complete(r, name) for r in done]
        self.reported += [(name, c) for c in completions]
        self.feed(report(name, *completions, now_s=self.now_s))

    def check(self) -> None:
        owned = self.scheduler.instances()
        assert owned == {name: len(held) for name, held in sorted(self.holds.items())}
        assert self.scheduler.num_open + len(self.delivered) == self.num_samples
        assert self.scheduler.num_waiting + sum(owned.values()) == self.scheduler.num_open

    def run(self) -> None:
        self.feed(arrived(self.num_samples))
        for _ in range(10_000):
            if not self.scheduler.num_open:
                return
            self.turn()
            self.check()
        raise AssertionError("samples are still open after 10000 events")


@pytest.mark.parametrize("seed", range(30))
def test_every_sample_completes_exactly_once_under_random_faults(seed):
    pool = Pool(seed, num_samples=60)
    pool.run()
    assert len(pool.delivered) == 60 and pool.alarms == []
    for key, completion in pool.delivered.items():
        assert completion.token_ids[0] == key.sample_index


def test_equal_events_give_equal_orders():
    pool = Pool(7, num_samples=40)
    pool.run()
    first, second = machine(), machine()
    for event in pool.events:
        # Completions hold arrays, so orders are compared by their text.
        assert repr(first.handle(event)) == repr(second.handle(event))


@pytest.mark.parametrize("seed", range(20))
def test_a_rebuilt_scheduler_goes_on_and_completes_every_sample_once(seed):
    pool = Pool(seed, num_samples=50)
    pool.join()
    pool.feed(arrived(50))
    for _ in range(40):
        pool.turn()
    pool.zombies.clear()
    unacknowledged = []
    snapshots = []
    for name, held in pool.holds.items():
        finished = held[: len(held) // 2]
        del held[: len(held) // 2]
        unacknowledged += finished
        snapshots.append(
            InstanceSnapshot(
                instance=name,
                num_slots=4,
                open_epochs={r.key: r.epoch for r in held},
                completions=tuple(complete(r, name) for r in finished),
            )
        )
    pool.scheduler, orders = Scheduler.rebuild(
        requests=[request(i) for i in range(50)],
        delivered=list(pool.delivered.values()),
        snapshots=snapshots,
        heartbeat_timeout_s=10.0,
        now_s=pool.now_s,
    )
    pool.carry_out(orders)
    pool.check()
    assert all(r.key in pool.delivered for r in unacknowledged)
    while pool.scheduler.num_open:
        pool.turn()
    assert len(pool.delivered) == 50 and pool.alarms == []


def test_a_rebuild_gives_a_doubly_held_sample_to_neither():
    held = {request(0).key: 3}
    snapshots = [InstanceSnapshot(instance=n, num_slots=1, open_epochs=held) for n in ("a", "b")]
    scheduler, orders = Scheduler.rebuild(
        requests=[request(0)], delivered=[], snapshots=snapshots, heartbeat_timeout_s=1.0, now_s=0.0
    )
    ((_, (again,)),) = submitted(orders).items()
    assert again.epoch == 4 and scheduler.num_open == 1


def test_a_rebuild_drops_what_was_finished_for_requests_delivered_long_ago():
    old, new = complete(request(0), "a"), complete(request(1), "a")
    snapshot = InstanceSnapshot(instance="a", num_slots=1, open_epochs={}, completions=(old, new))
    scheduler, orders = Scheduler.rebuild(
        requests=[request(1)], delivered=[], snapshots=[snapshot], heartbeat_timeout_s=1.0, now_s=0.0
    )
    (order,) = orders
    assert isinstance(order, Deliver) and order.completion is new
    assert scheduler.num_open == 0
