"""When the run begins anew from its last state: a trainer that is dead, silent, or did nobody knows what. No Ray."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from actors.ray_utils.deaths import cause_of
from actors.ray_utils.waiting import ActorDied
from cluster.resuming.restarts import as_trainer_lost
from core.errors import ConfigError, InstanceLost, RlhfSpecError, WaitTimeout, WeightsError


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
