"""Who is replaced and who is only missed: a frozen actor, a slow one, one that starts. No Ray."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from rlhfspec.actors.remote import heartbeat, stateless_pool
from rlhfspec.actors.remote.restart_budget import WINDOW_S
from rlhfspec.actors.remote.stateless_pool import PoolKind, StatelessPool
from rlhfspec.actors.remote.waiting import ActorDied
from rlhfspec.core.errors import WaitTimeout


@dataclass(eq=False)
class Actor:
    """Tells that it lives unless it is frozen; never answers what it is asked."""

    name: str
    frozen: bool = False
    asked: list[str] = field(default_factory=list)

    @property
    def alive(self) -> "Actor":
        return self

    def remote(self) -> "Alive":
        return Alive(self)


@dataclass(eq=False)
class Alive:
    of: Actor


@dataclass(eq=False)
class Question:
    of: Actor


class World:
    """A pool of one place, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, late: bool = False, restarts: int = 3) -> None:
        self.now_s = 0.0
        self.actors, self.killed, self.notes = [Actor("reward-0")], list[str](), list[str]()
        monkeypatch.setattr(stateless_pool, "wait_any", lambda refs, timeout_s: [])
        monkeypatch.setattr(
            heartbeat, "wait_any", lambda refs, timeout_s: [r for r in refs if not r.of.frozen]
        )
        monkeypatch.setattr(heartbeat.ray, "get", lambda ref: None)
        monkeypatch.setattr(stateless_pool, "get", lambda ref, **names: None)
        monkeypatch.setattr(stateless_pool.ray, "kill", lambda actor: self.killed.append(actor.name))
        kind: PoolKind[str] = PoolKind(
            stem="reward",
            call=self._ask,
            order=lambda question: f"score {question}",
            timeout_s=0.0 if late else 1e9,
            heartbeat_timeout_s=10.0,
            again=lambda questions: f"scores {len(questions)} again",
            culprit="the function",
            late_advice="fix it",
        )
        self.pool = StatelessPool(
            self.actors[:],
            kind,
            make=self._make,
            max_restarts=restarts,
            note=self.notes.append,
            clock=lambda: self.now_s,
        )

    def _ask(self, actor: Any, question: str) -> Question:
        actor.asked.append(question)
        return Question(actor)

    def _make(self, place: int, number: int) -> Actor:
        self.actors.append(Actor(f"reward-{place}-r{number}", frozen=True))
        return self.actors[-1]

    def check(self) -> None:
        self.pool.check(lambda actor: None, order="build", timeout_s=1.0)

    def look(self, seconds: int, *, step_s: float = 1.0) -> None:
        for _ in range(seconds):
            self.now_s += step_s
            self.pool.answers(wait_s=0.0)


def test_a_frozen_actor_is_replaced_at_the_heartbeats_limit_and_all_it_had_is_asked_again(monkeypatch):
    world = World(monkeypatch)
    world.check()
    world.actors[0].frozen = True
    world.pool.ask(0, "a")
    world.pool.ask(0, "b")
    world.look(11)
    assert not world.killed, "it was first asked a second after the order"
    world.look(1)
    assert world.killed == ["reward-0"] and world.actors[1].asked == ["a", "b"]
    (note,) = world.notes
    assert note.startswith("reward-0 gave no sign of life for 11 s") and "'score a'" in note
    assert note.endswith("reward-0-r1 takes its place and scores 2 again")


def test_a_replacement_that_starts_is_given_time_and_watched_from_its_first_sign_on(monkeypatch):
    world = World(monkeypatch)
    world.check()
    world.actors[0].frozen = True
    world.pool.ask(0, "a")
    world.look(60)
    assert world.killed == ["reward-0"]
    world.actors[1].frozen = False
    world.look(5)
    world.actors[1].frozen = True
    world.look(15)
    assert world.killed == ["reward-0", "reward-0-r1"] and world.actors[2].name == "reward-0-r2"


def test_a_slow_actor_that_lives_is_missed_and_lives_on(monkeypatch):
    world = World(monkeypatch, late=True)
    world.check()
    world.pool.ask(0, "a")
    with pytest.raises(WaitTimeout, match=r"reward-0 to answer 'score a'.*fix it"):
        world.look(1)
    assert not world.killed and len(world.actors) == 1


def test_a_late_actor_that_is_silent_too_is_frozen_and_replaced(monkeypatch):
    world = World(monkeypatch)
    world.check()
    world.actors[0].frozen = True
    world.pool.ask(0, "a")
    world.look(3)
    (open_question,) = world.pool._open.values()
    open_question.wait._timeout_s = 0.0
    world.look(9)
    assert world.killed == ["reward-0"] and world.actors[1].asked == ["a"]


def test_a_pause_of_the_loop_condemns_nobody(monkeypatch):
    world = World(monkeypatch)
    world.check()
    world.pool.ask(0, "a")
    world.look(1)
    world.actors[0].frozen = True
    world.look(1, step_s=3600.0)
    world.actors[0].frozen = False
    world.look(100)
    assert not world.killed


def test_replacements_are_bounded_within_an_hour_and_numbered_on_after_it(monkeypatch):
    world = World(monkeypatch, restarts=1)
    world.check()

    def freeze() -> None:
        world.actors[-1].frozen = False
        world.look(2)
        world.actors[-1].frozen = True
        world.look(12)

    world.pool.ask(0, "a")
    freeze()
    world.now_s += WINDOW_S
    freeze()
    assert [actor.name for actor in world.actors] == ["reward-0", "reward-0-r1", "reward-0-r2"]
    with pytest.raises(ActorDied, match=r"all 1 replacements of reward-0 within an hour"):
        freeze()
