"""What takes unusually long is said once, then seldom, and its end too; what is usual is never said. No Ray."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rlhfspec.actors.remote import watch
from rlhfspec.actors.remote.watch import FIRST_S, LEAST_S, OpenWait, Watch, waits_noted, watching


class Told:
    """A watch over a clock made by hand that is looked at every second."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.notes: list[str] = []
        self.watch = Watch(self.notes.append, clock=lambda: self.now_s)

    def begin(self, order: str = "update", timeout_s: float = 300.0) -> OpenWait:
        return OpenWait(
            waiter="the loop", waited_for="trainer", order=order, timeout_s=timeout_s, watch=self.watch
        )

    def pass_s(self, wait: OpenWait, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now_s += 1.0
            wait.look()

    def answer_after(self, seconds: float, order: str = "update") -> None:
        wait = self.begin(order)
        self.pass_s(wait, seconds)
        wait.answered()


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_first_answer_is_overdue_after_a_minute_and_notes_double_their_interval(told):
    wait = told.begin()
    told.pass_s(wait, FIRST_S - 1)
    assert told.notes == []
    told.pass_s(wait, 300 - FIRST_S)
    assert [note.split(" for ")[1].split(" (")[0] for note in told.notes] == ["60 s", "120 s", "240 s"]
    assert told.notes[0] == (
        "trainer has not answered 'update' for 60 s (never asked before); the loop gives up after 300 s"
    )


def test_an_overdue_answer_is_reported_when_it_comes_and_others_are_not(told):
    wait = told.begin()
    told.pass_s(wait, FIRST_S + 5)
    wait.answered()
    assert told.notes[-1] == "trainer answered 'update' after 65 s" and len(told.notes) == 2
    told.answer_after(40)
    assert len(told.notes) == 2


@pytest.mark.parametrize(("last_s", "missed_after_s"), [(1, LEAST_S), (5, LEAST_S), (20, 60), (80, 240)])
def test_the_usual_answer_time_decides_when_an_answer_is_overdue(told, last_s, missed_after_s):
    told.answer_after(last_s, order="load target version 1")
    told.notes.clear()
    wait = told.begin(order="load target version 2")
    told.pass_s(wait, missed_after_s - 1)
    assert told.notes == []
    told.pass_s(wait, 1)
    assert f"({last_s} s last time)" in told.notes[0]


def test_a_pause_of_the_own_process_does_not_count_as_waiting(told):
    told.answer_after(1)
    wait = told.begin()
    told.pass_s(wait, 3)
    told.now_s += 400.0
    wait.look()
    assert told.notes == [] and wait.left_s > 270.0
    wait.overslept(400.0)
    assert "this process itself stood still for 400 s" in told.notes[0]


def test_a_wait_that_begins_anew_counts_from_there(told):
    wait = told.begin()
    told.pass_s(wait, 50)
    wait.restart()
    told.pass_s(wait, 50)
    assert told.notes == [] and wait.waited_s == 50.0


def test_the_limit_begins_anew_where_the_other_side_gets_on_and_the_wait_does_not(told):
    wait = told.begin(timeout_s=100.0)
    told.pass_s(wait, 90.0)
    wait.heard()
    told.pass_s(wait, 60.0)
    assert (wait.left_s, wait.waited_s) == (40.0, 150.0)
    wait.answered()
    assert told.watch.usual_s("trainer: update") == 150.0


def test_one_that_gets_on_is_not_missed(told):
    wait = told.begin(timeout_s=100.0)
    for _ in range(60):
        told.pass_s(wait, 10.0)
        wait.heard()
    assert not told.notes
    told.pass_s(wait, 80.0)
    assert [note.rpartition("; ")[2] for note in told.notes] == ["the loop gives up after 700 s"]


def test_waits_inside_a_watched_block_are_reported_and_others_are_not():
    notes: list[str] = []
    names = {"waiter": "the loop", "waited_for": "trainer", "order": "update", "timeout_s": 300.0}
    with watching(notes.append):
        OpenWait(**names).overslept(90.0)
    OpenWait(**names).overslept(90.0)
    assert len(notes) == 1


def said_while_waiting(
    watched: Callable[[Callable[[str], None]], Any], names: list[str], num: int
) -> list[str]:
    """The first lines that are told of waits with these names, one a look."""
    lines, enough, step = [], threading.Event(), iter(names)

    def tell(text: str) -> None:
        lines.append(text)
        if len(lines) == num:
            enough.set()

    with watched(tell), waits_noted(lambda: next(step, names[-1])):
        assert enough.wait(60.0)
    assert not [one for one in threading.enumerate() if one.name == "waits"]
    return lines


def test_a_block_says_once_of_each_what_it_waits_for(monkeypatch):
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    names = ["models", "models", "gen-0", "gen-0", "trainer"]
    lines = said_while_waiting(watching, names, 3)
    assert lines == ["waiting for models", "waiting for gen-0", "waiting for trainer"]


def test_where_lines_replace_each_other_the_wait_is_shown_at_every_look(monkeypatch):
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    notes: list[str] = []
    lines = said_while_waiting(lambda tell: watching(notes.append, tell), ["gen-0"], 3)
    assert lines[:3] == ["waiting for gen-0; 0 s so far"] * 3 and not notes


def test_a_block_within_another_shows_its_waits_where_that_one_does(monkeypatch):
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    shown, notes, seen = [], [], threading.Event()
    outer = watching(notes.append, lambda text: (shown.append(text), seen.set()))
    with outer, watching(notes.append), waits_noted(lambda: "gen-1"):
        assert seen.wait(60.0)
    assert shown[0] == "waiting for gen-1; 0 s so far" and not notes
