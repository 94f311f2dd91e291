"""Whole rollouts on two instances with lengths we choose, under every way of placing samples.

A sample's length is forced by its own limit, which no policy looks at; stop tokens are off. `skewed` puts the longest
half on the first instance: long and short alternate in order of arrival, so that both static and pull binding do it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.support.actor_pool import ActorPool, RolloutOutcome
from benchmarks.support.workload import Workload
from core.records import SampleRequest
from policies.reallocation.gate import Gate, GateMode
from policies.reallocation.make import make_reallocation_policy
from policies.reallocation.rate_curve import RateCurve
from policies.reallocation.records import ReallocationPolicy

CURVE_BATCHES = (1, 4, 12, 24, 40)
CURVE_TOKENS = 160


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
) -> ReallocationPolicy:
    """A fresh policy: it has learnt nothing from other rollouts but their lengths."""
    return make_reallocation_policy(
        way.policy,
        curve=copy.deepcopy(curve),
        gate=Gate(kv_bytes_per_token=kv_bytes_per_token, mode=way.mode),
        earlier_lengths=earlier_lengths,
    )


def requests_of(workload: Workload, lengths: np.ndarray, *, first_index: int = 0) -> list[SampleRequest]:
    """One request a length, in this order of arrival; prompts are used again where they are too few."""
    prompts = workload.requests()
    requests = []
    for number, length in enumerate(lengths):
        like = prompts[number % len(prompts)]
        sampling = replace(like.sampling, max_new_tokens=int(length), stop_token_ids=())
        key = replace(like.key, sample_index=first_index + number)
        requests.append(replace(like, key=key, sampling=sampling))
    return requests


def measured_curve(pool: ActorPool, workload: Workload, batches: Sequence[int] = CURVE_BATCHES) -> RateCurve:
    """Goodput over running samples with all instances busy: equal samples, as many on each."""
    samples: list[float] = []
    rates: list[float] = []
    num_instances = len(pool.handles)
    for batch in batches:
        lengths = np.full(batch * num_instances, CURVE_TOKENS)
        outcome = pool.rollout(requests_of(workload, lengths, first_index=50_000), binding="static")
        for stats in outcome.stats.values():
            samples.append(stats.num_sample_steps / stats.num_decode_steps)
            rates.append(stats.num_emitted_tokens / stats.busy_s)
    return RateCurve(samples, rates)


def overhead_share(outcome: RolloutOutcome) -> float:
    """Decode-thread seconds of selection and migration over generation seconds."""
    stats = list(outcome.stats.values())
    busy_s = sum(each.busy_s + each.move_s for each in stats)
    return sum(each.select_s + each.move_s for each in stats) / busy_s
