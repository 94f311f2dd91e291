"""Generates through a scheduler actor and two generation actors: the real rollout path, without a learner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray

from actors.generation import GenerationActor
from actors.messages import GenerationSpec, SchedulerSettings
from actors.scheduler import SchedulerActor
from actors.waiting import get
from benchmarks.support.workload import Workload
from cluster.publish import PublishedWeights, publish
from core.config import EngineConfig, SpeculationConfig
from core.errors import WaitTimeout
from core.records import Completion, SampleKey, SampleRequest
from engine.weights import pack_weights

TIMEOUT_S = 240.0


def generate_on_two_actors(
    workload: Workload,
    requests: Sequence[SampleRequest],
    *,
    dtype: str,
    engine: EngineConfig,
    speculation: SpeculationConfig,
) -> dict[SampleKey, Completion]:
    """Return every completion by key. Ray must be running. Raises WaitTimeout after TIMEOUT_S."""
    scheduler = SchedulerActor.options(num_cpus=0.1).remote(
        SchedulerSettings(poll_interval_s=0.05, heartbeat_timeout_s=60.0, order_timeout_s=TIMEOUT_S)
    )
    handles = {
        name: GenerationActor.options(num_cpus=0.5).remote(_spec(name, workload, dtype, engine, speculation))
        for name in ("gen-0", "gen-1")
    }
    running = [scheduler.run.remote(), *(handle.run.remote() for handle in handles.values())]
    for manifest, chunks in (
        pack_weights(workload.target(dtype), name="target", weight_version=0),
        pack_weights(workload.draft(dtype), name="draft", weight_version=0),
    ):
        weights = PublishedWeights(manifest=manifest, chunk_refs=tuple(ray.put(chunk) for chunk in chunks))
        publish(weights, handles, timeout_s=TIMEOUT_S)
    for name, handle in handles.items():
        _ask(scheduler.join.remote(name, handle, engine.max_running_samples), "join")
    _ask(scheduler.enqueue.remote(tuple(requests)), "enqueue")
    done: dict[SampleKey, Completion] = {}
    deadline_s = time.monotonic() + TIMEOUT_S
    while len(done) < len(requests):
        done.update((c.key, c) for c in _ask(scheduler.take.remote(0.5), "take").completions)
        if time.monotonic() > deadline_s:
            raise WaitTimeout(
                waiter="the benchmark",
                waited_for="scheduler",
                order=f"complete {len(requests) - len(done)} more samples",
                waited_s=TIMEOUT_S,
                advice="look at the actors' logs",
            )
    for actor in (scheduler, *handles.values()):
        ray.kill(actor)
    del running
    return done


def _spec(
    name: str, workload: Workload, dtype: str, engine: EngineConfig, speculation: SpeculationConfig
) -> GenerationSpec:
    return GenerationSpec(
        instance=name,
        engine=engine,
        speculation=speculation,
        dtype=dtype,
        max_total_tokens=workload.max_total_tokens,
        vocab_size=workload.vocab_size,
        publish_interval_s=0.1,
    )


def _ask(ref: Any, order: str) -> Any:
    return get(ref, waiter="the benchmark", waited_for="scheduler", order=order, timeout_s=TIMEOUT_S)
