"""Every wait across processes ends, and says who waited for whom."""

import os
import pickle
import time
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import GetTimeoutError

import rlhfspec.actors.remote.waiting
import rlhfspec.actors.remote.watch
from rlhfspec.actors.remote.waiting import awake_s, get
from rlhfspec.actors.remote.watch import Watch
from rlhfspec.core.errors import InstanceLost, RewardError, WaitTimeout


@ray.remote(num_cpus=0, max_restarts=0)
class Partner:
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def die(self) -> None:
        os._exit(1)

    def refuse(self) -> None:
        raise RewardError("sample 7: the reward is nan")


def ask(ref, timeout_s: float = 30.0):
    return get(ref, waiter="the loop", waited_for="partner", order="act", timeout_s=timeout_s)


@pytest.mark.ray
def test_a_wait_ends_with_the_error_that_says_what_happened(local_ray):
    partner = Partner.remote()
    with pytest.raises(RewardError) as refused:
        ask(partner.refuse.remote())
    assert type(refused.value) is RewardError and str(refused.value) == "sample 7: the reward is nan"
    with pytest.raises(WaitTimeout, match=r"the loop waited .* for partner to answer 'act'"):
        ask(partner.sleep.remote(5), timeout_s=0.2)
    with pytest.raises(InstanceLost, match="partner died while the loop waited for 'act'"):
        ask(partner.die.remote())


class StoppedOnce:
    """`ray.get` and a clock made by hand: the process is stopped for 400 s in the third look."""

    def __init__(self, answer_after: int) -> None:
        self.now_s = 50.0
        self.num_looks = 0
        self.answer_after = answer_after

    def monotonic(self) -> float:
        return self.now_s

    def get(self, ref: object, timeout: float) -> str:
        self.num_looks += 1
        self.now_s += timeout + (400.0 if self.num_looks == 3 else 0.0)
        if self.num_looks < self.answer_after:
            raise GetTimeoutError("not ready")
        return "answer"


@pytest.mark.parametrize("answer_after", [3, 9])
def test_a_process_that_was_stopped_goes_on_waiting_and_says_what_it_slept_through(monkeypatch, answer_after):
    process, notes = StoppedOnce(answer_after), []

    def wait(refs, *, num_returns, timeout, fetch_local):
        try:
            process.get(refs[0], timeout=timeout)
        except GetTimeoutError:
            return [], refs
        return refs, []

    monkeypatch.setattr(rlhfspec.actors.remote.waiting.ray, "wait", wait)
    monkeypatch.setattr(rlhfspec.actors.remote.waiting.ray, "get", lambda ref, timeout: "answer")
    monkeypatch.setattr(rlhfspec.actors.remote.waiting, "require_node", lambda: None)
    for module in (rlhfspec.actors.remote.waiting, rlhfspec.actors.remote.watch):
        monkeypatch.setattr(module.time, "monotonic", process.monotonic)
    before_s = awake_s()
    watch = Watch(notes.append, clock=process.monotonic)
    monkeypatch.setattr(rlhfspec.actors.remote.watch, "_current", SimpleNamespace(get=lambda default: watch))
    assert ask(None, timeout_s=30.0) == "answer"
    assert awake_s() - before_s == pytest.approx(answer_after), (
        "a limit shared by several waits leaves it out too"
    )
    said = ["this process itself stood still for 400 s"] if answer_after > 3 else []
    assert [note.split(" (")[0] for note in notes] == said


def test_a_wait_timeout_survives_pickling():
    error = WaitTimeout(waiter="a", waited_for="b", order="c", waited_s=2.0, advice="d")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is WaitTimeout and str(copy) == str(error)
