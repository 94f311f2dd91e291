"""Of several that wait for each other, the one that explains the others' failure is named, soon."""

import os
import time

import pytest
import ray

from rlhfspec.actors.remote.waiting import explaining, get_all
from rlhfspec.actors.remote.watch import open_waits
from rlhfspec.core.errors import InstanceLost, NotFiniteError, PeerLost, WaitTimeout

pytestmark = pytest.mark.ray
LONG_S = 120.0


@ray.remote(num_cpus=0.01)
class Member:
    """Answers, fails or falls silent as it is told."""

    def answer(self, what: str, after_s: float = 0.0) -> str:
        time.sleep(after_s)
        if what == "die":
            os._exit(1)
        if what == "silent":
            time.sleep(3600.0)
        if what == "lost":
            raise PeerLost(
                "trainer 0 of 3 could not update: another trainer died or fell silent (Connection closed)"
            )
        if what == "nan":
            raise NotFiniteError("the loss is nan")
        if what == "bug":
            raise KeyError("bug")
        return what


@pytest.fixture(scope="module")
def idle(local_ray):
    """Members that have answered, for the next test."""
    members = []
    yield members
    for one in members:
        ray.kill(one)


@pytest.fixture
def ask(idle):
    asked = []

    def ask(*whats, timeout_s=LONG_S, meanwhile=None):
        idle.extend(Member.remote() for _ in whats[len(idle) :])
        members = [idle.pop() for _ in whats]
        asked.extend(zip(members, whats, strict=True))
        ray.get([one.__ray_ready__.remote() for one in members], timeout=LONG_S)
        refs = {
            f"trainer-{i}": one.answer.remote(what)
            for i, (one, what) in enumerate(zip(members, whats, strict=True))
        }
        return get_all(refs, waiter="the loop", order="update", timeout_s=timeout_s, meanwhile=meanwhile)

    yield ask
    for one, what in asked:
        if what in ("die", "silent"):
            ray.kill(one)
        else:
            idle.append(one)


@pytest.mark.parametrize("whats", [("silent",), ("silent", "b")])
def test_what_is_done_meanwhile_neither_hides_nor_lengthens_the_wait(ask, whats):
    seen = []
    with pytest.raises(WaitTimeout, match="trainer-0") as raised:
        ask(*whats, timeout_s=3.0, meanwhile=lambda: seen.append(open_waits()))
    assert seen and all(any(wait.order == "update" for wait in waits) for waits in seen)
    assert "after 3" in str(raised.value) or "waited 3" in str(raised.value)


def test_every_answer_comes_by_name(ask):
    assert ask("a", "b") == {"trainer-0": "a", "trainer-1": "b"}
    assert ask("alone") == {"trainer-0": "alone"}


def test_the_dead_one_is_named_though_others_say_they_lost_somebody(ask):
    with pytest.raises(InstanceLost, match=r"^trainer-1 died while the loop waited for 'update'"):
        ask("lost", "die", "silent")


def test_what_one_raised_itself_counts_more_than_what_the_others_make_of_it(ask):
    with pytest.raises(NotFiniteError, match=r"the loss is nan"):
        ask("lost", "nan")
    with pytest.raises(KeyError, match=r"bug"):
        ask("lost", "bug")


def test_the_silent_one_is_named_when_the_others_gave_up(ask):
    with pytest.raises(InstanceLost, match=r"^trainer-1 neither answered 'update' nor died.*trainer-0 says"):
        ask("lost", "silent")


def test_who_dies_at_the_limit_has_waited_for_the_silent_one():
    dead = {"trainer-0": InstanceLost("trainer-0 died")}
    assert explaining(dead, ["trainer-1"], "update", gave_up=False) is dead["trainer-0"]
    named = explaining(dead, ["trainer-1"], "update", gave_up=True)
    assert str(named).startswith("trainer-1 neither answered 'update' nor died")
    assert explaining(dead, [], "update", gave_up=True) is dead["trainer-0"], "nobody else is to blame"


def test_nobody_answers_in_time(ask):
    with pytest.raises(WaitTimeout, match=r"the loop waited [0-9]+ s for trainer-1 to answer 'update'"):
        ask("fine", "silent", timeout_s=2.0)
