"""Every wait across processes ends, and says who waited for whom."""

import os
import pickle
import time

import pytest
import ray

from actors.waiting import get
from core.errors import InstanceLost, RewardError, WaitTimeout


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


def test_a_wait_timeout_survives_pickling():
    error = WaitTimeout(waiter="a", waited_for="b", order="c", waited_s=2.0, advice="d")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is WaitTimeout and str(copy) == str(error)
