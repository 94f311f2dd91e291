"""Whole rollouts of the real model on two instances: static, pull, ours; lengths are drawn, as for the small pairs."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.console import Console

from benchmarks.moving.rates import measured_rates
from benchmarks.moving.rollouts import OURS, PULL, STATIC, policy_of, requests_of
from benchmarks.support.actor_pool import ActorPool, bench_ray
from benchmarks.support.result import write_result
from benchmarks.support.timing import Figures
from benchmarks.support.workload import real_workload
from rlhfspec.core.config import EngineConfig, ReallocationConfig, SpeculationConfig
from rlhfspec.engine.cache.kv_pool import KVShape
from rlhfspec.policies.migration.move_messages import MoveOutcome
from rlhfspec.policies.simulate.workloads import drawn_lengths

INSTANCES = 2
SAMPLES = {"quick": 16, "default": 48, "full": 64}
MAX_TOKENS = {"quick": 64, "default": 192, "full": 256}
ROUNDS = {"quick": 1, "default": 3, "full": 5}
WAYS = (STATIC, PULL, OURS)
EARLIER_SEED = 900


def run_rollout(*, out: Path, mode: str, data: Path | None, console: Console) -> int:
    """Write OUT/rollout_real.json: how many times as fast ours is, on skewed lengths; returns 0."""
    samples, most = SAMPLES[mode], MAX_TOKENS[mode]
    workload = real_workload(samples, data=data, max_new_tokens=most, console=console)
    if workload is None:
        return 0
    lengths = drawn_lengths("skewed", samples, INSTANCES, max_new_tokens=most, seed=0)
    earlier = drawn_lengths("long_tail", samples, INSTANCES, max_new_tokens=most, seed=EARLIER_SEED)
    kv_bytes = float(KVShape.of(workload.target("float32").config).token_bytes)
    seconds: dict[str, list[float]] = {way.name: [] for way in WAYS}
    moved: list[int] = []
    with bench_ray("bench-rollout-real"):
        pool = ActorPool(
            workload,
            engine=EngineConfig(max_running_samples=samples, probe=False),
            speculation=SpeculationConfig(policy="off"),
            migration=ReallocationConfig(),
        )
        try:
            curve = measured_rates(pool, workload, earlier[::INSTANCES], 1).curve
            for number in range(ROUNDS[mode]):
                for way in WAYS if number % 2 == 0 else reversed(WAYS):
                    outcome = pool.rollout(
                        requests_of(workload, lengths),
                        reallocation=policy_of(way, curve, kv_bytes, earlier.tolist()),
                        binding=way.binding,
                    )
                    seconds[way.name].append(outcome.seconds)
                    if way is OURS:
                        moved.append(sum(move.outcome == MoveOutcome.MOVED for move in outcome.moves))
                console.print({name: round(values[-1], 2) for name, values in seconds.items()})
        finally:
            pool.close()
    figures = Figures()
    for other in (STATIC, PULL):
        pairs = zip(seconds[other.name], seconds[OURS.name], strict=True)
        figures.keep(f"skewed_over_{other.name}_real", [slow / fast for slow, fast in pairs])
    figures.values["moves_per_rollout_real"] = statistics.fmean(moved)
    provenance = {"mode": mode, "samples": samples, "data": data.name if data else None}
    write_result(out, "rollout_real", figures.values, figures.intervals, provenance)
    console.print(figures.values)
    return 0
