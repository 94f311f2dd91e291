"""An actor at work that answers is left to its work, however long; one that is silent is named in time."""

from dataclasses import dataclass, field

import pytest
from ray.exceptions import RayActorError

from rlhfspec.actors.remote import heartbeat as heartbeat_module
from rlhfspec.actors.remote.heartbeat import Heartbeat
from rlhfspec.actors.remote.waiting import ActorDied


@dataclass
class FakeTrainer:
    """Answers at once with how far it is, unless it is frozen or dead; stands for its own method."""

    count: int = 0
    state: str = "alive"
    asked: list["Answer"] = field(default_factory=list)

    @property
    def forwards_so_far(self) -> "FakeTrainer":
        return self

    def remote(self) -> "Answer":
        self.asked.append(Answer(self, self.count))
        return self.asked[-1]


@dataclass
class Answer:
    of: FakeTrainer
    count: int


def value_of(answer: Answer) -> int:
    if answer.of.state == "dead":
        raise RayActorError
    return answer.count


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        heartbeat_module,
        "wait_any",
        lambda refs, timeout_s: [ref for ref in refs if ref.of.state != "frozen"],
    )
    monkeypatch.setattr(heartbeat_module.ray, "get", value_of)


def beating(clock: Clock, *, timeout_s: float = 10.0, **trainers: FakeTrainer) -> Heartbeat:
    heartbeat = Heartbeat(lambda one: one.forwards_so_far.remote(), timeout_s=timeout_s, clock=clock)
    for name, trainer in trainers.items():
        heartbeat.watch(name, trainer, "update")
    return heartbeat


def test_one_that_answers_is_never_lost_and_gets_on_while_it_makes_forwards():
    clock, trainer = Clock(), FakeTrainer()
    heartbeat = beating(clock, trainer=trainer)
    seen = []
    for second in range(100):
        clock.now_s += 1.0
        trainer.count += second % 3 == 0
        seen.append(heartbeat.look())
    # the first look asks; what was asked before is read one look later
    assert 30 <= sum(seen) <= 35 and len(trainer.asked) == 100


def test_of_two_the_frozen_one_is_named_after_the_limit():
    clock, alive, frozen = Clock(), FakeTrainer(), FakeTrainer()
    heartbeat = beating(clock, alive=alive, frozen=frozen)
    heartbeat.look()
    frozen.state = "frozen"
    with pytest.raises(
        ActorDied, match=r"^frozen gave no sign of life for 11 s .* waited for 'update'"
    ) as caught:
        for _ in range(20):
            clock.now_s += 1.0
            heartbeat.look()
    assert clock.now_s == 11.0 and caught.value.name == "frozen"
    assert heartbeat.is_silent("frozen") and not heartbeat.is_silent("alive")
    assert len(frozen.asked) == 1, "an actor that is silent gets no heap of questions"


@pytest.mark.parametrize("timeout_s", [60.0, 2.0])
def test_a_pause_of_the_loop_itself_condemns_nobody(timeout_s):
    clock, frozen = Clock(), FakeTrainer(state="frozen")
    heartbeat = beating(clock, timeout_s=timeout_s, trainer=frozen)
    heartbeat.look()
    clock.now_s += 3600.0
    assert not heartbeat.look()


def test_of_a_dead_one_its_order_tells():
    clock, dead = Clock(), FakeTrainer()
    heartbeat = beating(clock, trainer=dead)
    heartbeat.look()
    dead.state = "dead"
    for _ in range(30):
        clock.now_s += 1.0
        assert not heartbeat.look()
    assert len(dead.asked) == 1


def test_one_that_starts_may_take_its_time_and_counts_from_its_first_answer():
    clock, starting = Clock(), FakeTrainer(state="frozen")
    heartbeat = beating(clock)
    heartbeat.watch("reward-0-r1", starting, "score", is_up=False)
    for _ in range(100):
        clock.now_s += 1.0
        heartbeat.look()
    assert not heartbeat.is_silent("reward-0-r1")
    starting.state = "alive"
    heartbeat.look()
    starting.state = "frozen"
    with pytest.raises(ActorDied, match="reward-0-r1 gave no sign of life"):
        for _ in range(20):
            clock.now_s += 1.0
            heartbeat.look()


def test_one_that_is_asked_nothing_any_more_is_left_alone():
    clock, frozen = Clock(), FakeTrainer(state="frozen")
    heartbeat = beating(clock, trainer=frozen)
    heartbeat.look()
    heartbeat.keep(())
    clock.now_s += 5.0
    heartbeat.look()
    heartbeat.watch("trainer", frozen, "update")
    for _ in range(10):
        clock.now_s += 1.0
        heartbeat.look()
    assert clock.now_s == 15.0 and len(frozen.asked) == 2, "its silence counts from the new order"
