"""Whole rollouts on instances of this machine: ways to move samples, requests of given lengths, what a plan takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...core.records import Prompt, SampleKey, SampleRequest, SamplingParams, as_asked
from ...policies.reallocation.by_name import make_reallocation_policy
from ...policies.reallocation.finish_time_policy import FinishTimePolicy
from ...policies.reallocation.gate import Gate, GateMode
from ...policies.reallocation.pool_records import InstanceView, PoolView, ReallocationPolicy
from ...policies.reallocation.rate_curve import RateCurve
from ...policies.scheduling.events import InstanceJoined, InstanceReported, SamplesArrived
from ...policies.scheduling.scheduler import Scheduler
from ..support.actor_pool import RolloutOutcome
from ..support.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of placing samples."""

    name: str
    binding: str = "pull"
    policy: str = "pull"
    mode: GateMode = "auto"


STATIC = Way(name="static", binding="static", policy="static")
PULL = Way(name="pull")
RECOMPUTE = Way(name="recompute only", policy="finish_time", mode="always_recompute")
PAPER = Way(name="paper rule", policy="paper_rule")
OURS = Way(name="ours", policy="finish_time")


def policy_of(
    way: Way, curve: RateCurve, kv_bytes_per_token: float, earlier_lengths: Sequence[int] = ()
) -> ReallocationPolicy | None:
    """A fresh policy: it has learnt nothing from other rollouts but their lengths."""
    return make_reallocation_policy(
        way.policy,
        curve=curve.copy(),
        gate=Gate(kv_bytes_per_token=kv_bytes_per_token, mode=way.mode),
        earlier_lengths=earlier_lengths,
    )


def requests_of(workload: Workload, lengths: np.ndarray, *, first_index: int = 0) -> list[SampleRequest]:
    """Requests for responses of these lengths, [n], with keys from `first_index` on; prompts are used again."""
    prompts = workload.requests()
    key = prompts[0].key
    return [
        replace(
            prompts[number % len(prompts)],
            key=replace(key, sample_index=first_index + number),
            sampling=replace(workload.sampling, max_new_tokens=int(length), stop_token_ids=()),
        )
        for number, length in enumerate(lengths)
    ]


def overhead_shares(outcome: RolloutOutcome) -> dict[str, float]:
    """Decode-thread seconds of selection, migration and telling the scheduler, each over generation seconds."""
    stats = list(outcome.stats.values())
    busy_s = sum(each.busy_s + each.move_s + each.publish_s for each in stats)
    return {
        "select_share": sum(each.select_s for each in stats) / busy_s,
        "move_share": sum(each.move_s for each in stats) / busy_s,
        "publish_share": sum(each.publish_s for each in stats) / busy_s,
    }


SAMPLES_PER_INSTANCE = 32
PLANS = 7


def plan_seconds(num_instances: int, kv_bytes_per_token: float) -> float:
    """Median seconds of a plan for `num_instances` of 32 long-tailed samples each, one thread."""
    random = np.random.default_rng(0)
    policy = FinishTimePolicy(_plan_curve(), Gate(kv_bytes_per_token=kv_bytes_per_token))
    for length in random.lognormal(4.7, 0.8, 2000):
        policy.note_finished(int(min(max(length, 1), 640)))
    seconds: list[float] = []
    for number in range(PLANS):
        view = _view(num_instances, random, now_s=10.0 * number)
        began_s = time.perf_counter()
        policy.plan(view)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def reallocate_seconds(num_instances: int, kv_bytes_per_token: float) -> float:
    """Median seconds in which a scheduler of so many instances looks at its pool and orders moves, one thread.

    Each has up to 32 samples, of 0 to 599 tokens. Moves that were ordered before are on their way.
    """
    random = np.random.default_rng(0)
    policy = FinishTimePolicy(_plan_curve(), Gate(kv_bytes_per_token=kv_bytes_per_token))
    scheduler = Scheduler(heartbeat_timeout_s=3600.0, binding="static", reallocation=policy)
    names = [f"gen-{number:04d}" for number in range(num_instances)]
    for name in names:
        scheduler.handle(InstanceJoined(instance=name, num_slots=SAMPLES_PER_INSTANCE, now_s=0.0))
    prompt = Prompt(prompt_id=0, token_ids=np.arange(20))
    requests = [
        SampleRequest(
            key=SampleKey(run_seed=0, sample_index=index),
            prompt=prompt,
            sampling=SamplingParams(max_new_tokens=640),
        )
        for index in range(num_instances * SAMPLES_PER_INSTANCE)
    ]
    scheduler.handle(SamplesArrived(requests=tuple(requests)))
    for number, name in enumerate(names):
        mine = requests[number::num_instances]
        count = int(random.integers(1, SAMPLES_PER_INSTANCE + 1))
        lengths = random.integers(0, 600, count).tolist()
        progress = {request.key: length for request, length in zip(mine, lengths, strict=False)}
        ended = tuple(as_asked(request) for request in mine[count:])
        scheduler.handle(InstanceReported(instance=name, now_s=0.0, progress=progress, completions=ended))
    seconds: list[float] = []
    for number in range(PLANS):
        began_s = time.perf_counter()
        scheduler.reallocate(0.1 * number)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def _plan_curve() -> RateCurve:
    return RateCurve([1, 4, 16, 64], [300.0, 900.0, 1500.0, 1700.0])


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
