"""When the run begins anew from its last state: a trainer that is dead, silent, or did nobody knows what. No Ray."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from rlhfspec.actors.remote.deaths import cause_of
from rlhfspec.actors.remote.restart_budget import WINDOW_S
from rlhfspec.actors.remote.waiting import ActorDied
from rlhfspec.cluster.resume import trainer_restarts as restarts
from rlhfspec.cluster.resume.trainer_restarts import TrainerRestarts, as_trainer_lost
from rlhfspec.core.errors import (
    ConfigError,
    InstanceLost,
    RlhfSpecError,
    TrainerLost,
    WaitTimeout,
    WeightsError,
)


class Trainers:
    """Names, of which some do not answer."""

    def __init__(self, silent: list[str]) -> None:
        self.handles = {"trainer-0": None, "trainer-1": None}
        self.silent, self.killed = silent, False

    def lost(self, *, or_silent: bool) -> list[str]:
        return list(self.silent) if or_silent else []

    def kill(self) -> None:
        self.killed = True


def lost(error: RlhfSpecError, *silent: str, machines: tuple[str, ...] = ()) -> str | None:
    trainers = Trainers(list(silent))
    system: Any = SimpleNamespace(trainers=trainers, lost_machines=lambda: list(machines))
    found = as_trainer_lost(system, error)
    assert trainers.killed == (found is not None)
    return None if found is None else str(found)


def test_a_trainer_whose_connection_broke_counts_as_lost_though_it_answers_again() -> None:
    died = ActorDied("trainer-1 died while the loop waited for 'update': ...", "trainer-1")
    assert lost(died) == f"trainer-1 was lost: {died}"
    assert lost(died, "trainer-1") == f"trainer-1 was lost: {died}"
    why = cause_of(ActorUnavailableError("Socket closed rpc_code: 14", b"\0" * 16))
    assert why == "its connection broke; whether it lives, and did what it was asked, is not known"


@pytest.mark.parametrize(
    "error", [ActorDied("gen-0 died", "gen-0"), InstanceLost("gen-0 is silent"), WeightsError("x")]
)
def test_the_loss_of_somebody_else_is_no_trainers(error: RlhfSpecError) -> None:
    assert lost(error) is None


def test_a_machine_that_went_with_the_scheduler_makes_the_run_begin_anew_elsewhere() -> None:
    error = WaitTimeout(
        waiter="the loop", waited_for="scheduler-r1", order="rebuild its state", waited_s=300.0, advice="look"
    )
    assert lost(error) is None
    assert lost(error, machines=("node-0",)) == f"machine node-0 was lost: {error}"
    assert lost(WeightsError("x"), machines=("node-0",)) is None


def test_a_silent_trainer_explains_a_loss_and_no_other_error() -> None:
    assert lost(InstanceLost("x"), "trainer-0") == "trainer-0 was lost: x"
    assert lost(WeightsError("x"), "trainer-0") is None
    assert lost(ConfigError("x"), "trainer-0") is None


class Played:
    """A run whose trainers are lost now and then, where its last state says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, most: int) -> None:
        self.now_s, self.finished, self.notes = 0.0, 0, list[str]()
        monkeypatch.setattr(restarts, "last_state", lambda *_: SimpleNamespace(num_iterations=self.finished))
        monkeypatch.setattr(restarts, "rewind", lambda *_: None)
        owner = SimpleNamespace(require=lambda: None)
        run_dir: Any = SimpleNamespace(path="runs/r", owner=owner, goes_on=lambda: "how to go on")
        self.restarts = TrainerRestarts(run_dir, most=most, note=self.notes.append, clock=lambda: self.now_s)

    def lose(self, *, after_s: float, finished: int) -> None:
        self.now_s, self.finished = self.now_s + after_s, finished
        self.restarts.after(TrainerLost("trainer-0 was lost: x"))


def test_separate_losses_of_a_week_never_end_a_run_that_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Played(monkeypatch, most=1)
    for day in range(7):
        run.lose(after_s=24 * WINDOW_S, finished=10 * day)
    assert run.notes[-1] == (
        "trainer-0 was lost: x; restart 1 of 1: the run goes on from its state after iteration 60"
    )


def test_losses_within_an_hour_use_the_restarts_up_though_the_run_gets_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Played(monkeypatch, most=2)
    run.lose(after_s=0.0, finished=0)
    run.lose(after_s=60.0, finished=10)
    assert "restart 2 of 2" in run.notes[-1]
    with pytest.raises(TrainerLost, match=r"all 2 restarts .*max_trainer_restarts.*; how to go on$"):
        run.lose(after_s=60.0, finished=20)


def test_a_run_that_never_reaches_its_next_state_ends_however_long_each_try_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Played(monkeypatch, most=2)
    for finished in (0, 10, 10):
        run.lose(after_s=2 * WINDOW_S, finished=finished)
    assert "restart 2 of 2" in run.notes[-1]
    with pytest.raises(TrainerLost, match="or from one state"):
        run.lose(after_s=2 * WINDOW_S, finished=10)
