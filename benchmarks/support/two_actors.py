"""Generates through a scheduler actor and two generation actors: the real rollout path, without a learner."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.support.actor_pool import ActorPool
from benchmarks.support.workload import Workload
from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.records import Completion, SampleKey, SampleRequest


def generate_on_two_actors(
    workload: Workload,
    requests: Sequence[SampleRequest],
    *,
    dtype: str,
    engine: EngineConfig,
    speculation: SpeculationConfig,
) -> dict[SampleKey, Completion]:
    """Return every completion by key. Ray must be running. Raises WaitTimeout."""
    pool = ActorPool(workload, dtype=dtype, engine=engine, speculation=speculation)
    try:
        return pool.rollout(requests).completions
    finally:
        pool.close()
