"""What the scheduler's table says an instance does: busy, idle, training, since when; a log of events replays it."""

from move_messages import complete, request

from rlhfspec.policies.scheduling.events import (
    ClockTicked,
    Event,
    InstanceJoined,
    InstanceReported,
    SamplesArrived,
)
from rlhfspec.policies.scheduling.members import Activity
from rlhfspec.policies.scheduling.scheduler import Scheduler


def scheduler_of(*names: str) -> Scheduler:
    scheduler = Scheduler(heartbeat_timeout_s=1000.0)
    for name in names:
        scheduler.handle(InstanceJoined(instance=name, num_slots=2, now_s=0.0))
    return scheduler


def told(name: str, now_s: float, *, is_training: bool = False, completions=()) -> InstanceReported:
    return InstanceReported(instance=name, now_s=now_s, is_training=is_training, completions=completions)


def seen(scheduler: Scheduler, name: str, now_s: float) -> tuple[Activity, float]:
    scheduler.handle(ClockTicked(now_s=now_s))
    member = scheduler.members[name]
    return member.activity, member.since_s


def test_an_instance_is_idle_then_busy_then_trains():
    scheduler = scheduler_of("gen-0")
    assert seen(scheduler, "gen-0", 5.0) == (Activity.IDLE, 0.0)
    scheduler.handle(SamplesArrived(requests=(request(0),)))
    assert seen(scheduler, "gen-0", 6.0) == (Activity.BUSY, 6.0)
    assert seen(scheduler, "gen-0", 8.0) == (Activity.BUSY, 6.0)
    scheduler.handle(told("gen-0", 9.0, completions=(complete(request(0), "gen-0"),)))
    assert seen(scheduler, "gen-0", 9.0) == (Activity.IDLE, 9.0)
    scheduler.handle(told("gen-0", 11.0, is_training=True))
    assert seen(scheduler, "gen-0", 11.0) == (Activity.TRAINING, 11.0)
    assert scheduler.members["gen-0"].free_since_s == 9.0, "training is not work: it may leave all the same"


def test_who_owns_samples_is_busy_whatever_it_told_last():
    scheduler = scheduler_of("gen-0")
    scheduler.handle(told("gen-0", 1.0, is_training=True))
    assert seen(scheduler, "gen-0", 1.0) == (Activity.TRAINING, 1.0)
    # the samples are on their way: its next poll will tell that it has stopped
    scheduler.handle(SamplesArrived(requests=(request(0),)))
    assert seen(scheduler, "gen-0", 2.0) == (Activity.BUSY, 2.0)
    assert scheduler.members["gen-0"].free_since_s is None


def test_equal_events_give_equal_states():
    events: list[Event] = [
        SamplesArrived(requests=(request(0), request(1), request(2))),
        ClockTicked(now_s=1.0),
        told("gen-0", 2.0, completions=(complete(request(0), "gen-0"),)),
        told("gen-1", 2.5, completions=(complete(request(1), "gen-1"),)),
        ClockTicked(now_s=3.0),
        told("gen-1", 4.0, is_training=True),
        ClockTicked(now_s=4.5),
    ]
    tables = []
    for _ in range(2):
        scheduler = scheduler_of("gen-0", "gen-1")
        for event in events:
            scheduler.handle(event)
        tables.append({name: (one.activity, one.since_s) for name, one in scheduler.members.items()})
    assert tables[0] == tables[1]
    assert tables[0] == {"gen-0": (Activity.BUSY, 1.0), "gen-1": (Activity.TRAINING, 4.5)}
