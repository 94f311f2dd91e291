"""A simulated pool that may grow is sooner done; a start that takes too long changes nothing; who idles goes."""

import numpy as np
from pool_views import cpu_curve

from rlhfspec.policies.simulate.compare import compare
from rlhfspec.policies.simulate.simulation_records import (
    Elastic,
    MoveTruth,
    PoolSetup,
    SimulationResult,
    drawn_lengths,
    samples_of,
)


def rollout(elastic: Elastic | None, *, num_samples: int = 200, instances: int = 2) -> SimulationResult:
    lengths = drawn_lengths("long_tail", num_samples, 2, max_new_tokens=640, seed=3)
    setup = PoolSetup(
        num_instances=instances,
        num_slots=16,
        curve=cpu_curve(),
        max_new_tokens=640,
        moves=MoveTruth(kv_bytes_per_token=16384),
        elastic=elastic,
    )
    return compare(samples_of(lengths, prompt_tokens=20, seed=3), setup, ("static", "finish_time")).results[
        "finish_time"
    ]


def test_a_pool_that_may_grow_is_sooner_done_and_a_slow_start_changes_nothing():
    fixed = rollout(None)
    quick, slow = (rollout(Elastic(least=2, most=6, start_up_s=s, idle_timeout_s=60.0)) for s in (1.0, 1e3))
    assert quick.finish_s < 0.8 * fixed.finish_s and quick.resizes[0][1].target > 2
    assert slow.finish_s == fixed.finish_s and not slow.resizes
    assert np.isclose(fixed.instance_s, 2 * fixed.finish_s)
    assert quick.num_tokens == fixed.num_tokens and (quick.busy_s[2:] > 0).any()


def test_instances_that_are_not_missed_leave_before_the_end():
    many = rollout(Elastic(least=1, most=6, start_up_s=5.0, idle_timeout_s=0.3), instances=6, num_samples=30)
    fixed = rollout(None, instances=6, num_samples=30)
    assert any(change.leave for _, change in many.resizes)
    assert many.instance_s < 0.9 * fixed.instance_s and many.finish_s < 1.2 * fixed.finish_s
