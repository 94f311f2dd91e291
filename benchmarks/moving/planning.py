"""How long one plan of the finish-time policy takes for a large pool."""

from __future__ import annotations

import statistics
import time

import numpy as np

from rlhfspec.core.records import SampleKey
from rlhfspec.policies.reallocation.by_name import make_reallocation_policy
from rlhfspec.policies.reallocation.gate import Gate
from rlhfspec.policies.reallocation.pool_records import InstanceView, PoolView
from rlhfspec.policies.reallocation.rate_curve import RateCurve

SAMPLES_PER_INSTANCE = 32
PLANS = 7


def plan_seconds(num_instances: int, kv_bytes_per_token: float) -> float:
    """Median seconds of a plan for `num_instances` of 32 long-tailed samples each, one thread."""
    random = np.random.default_rng(0)
    curve = RateCurve([1, 4, 16, 64], [300.0, 900.0, 1500.0, 1700.0])
    policy = make_reallocation_policy(
        "finish_time", curve=curve, gate=Gate(kv_bytes_per_token=kv_bytes_per_token)
    )
    for length in random.lognormal(4.7, 0.8, 2000):
        policy.note_finished(int(min(max(length, 1), 640)))
    seconds: list[float] = []
    for number in range(PLANS):
        view = _view(num_instances, random, now_s=10.0 * number)
        began_s = time.perf_counter()
        policy.plan(view)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def _view(num_instances: int, random: np.random.Generator, *, now_s: float) -> PoolView:
    instances = []
    for number in range(num_instances):
        count = int(random.integers(1, SAMPLES_PER_INSTANCE + 1))
        tokens = random.integers(1, 600, count)
        instances.append(
            InstanceView(
                instance=f"gen-{number:04d}",
                num_slots=SAMPLES_PER_INSTANCE,
                keys=tuple(
                    SampleKey(run_seed=0, sample_index=number * SAMPLES_PER_INSTANCE + i)
                    for i in range(count)
                ),
                response_tokens=tokens,
                context_tokens=tokens + 20,
                goodput_tokens_per_s=1500.0,
            )
        )
    return PoolView(now_s=now_s, instances=tuple(instances), num_queued=0, max_new_tokens=640)
