"""Whole rollouts on two instances in orders of arrival that we choose, under every way of placing samples.

A sample's length is its own: a rollout is a function of its key, so one run tells the lengths, and the scenes order
the samples by them. No policy knows. `skewed` puts the longest half on the first instance: long and short alternate
in order of arrival, so that both static and pull binding do it.
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

CURVE_BATCHES = (1, 2, 4, 8, 16, 32)


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


def requests_of(workload: Workload, count: int, *, first_index: int) -> list[SampleRequest]:
    """Requests with keys from `first_index` on; prompts are used again where they are too few."""
    prompts = workload.requests()
    key = prompts[0].key
    return [
        replace(prompts[number % len(prompts)], key=replace(key, sample_index=first_index + number))
        for number in range(count)
    ]


def skewed(requests: Sequence[SampleRequest], lengths: np.ndarray) -> np.ndarray:
    """Order of arrival with long and short in turn: the longest half goes to the first of two instances."""
    order, half = np.argsort(-lengths, kind="stable"), len(requests) // 2
    random = np.random.default_rng(0)
    # within each half a fixed shuffle: arrival says nothing of the length
    return np.stack([random.permutation(order[:half]), random.permutation(order[half:])], axis=1).ravel()


def balanced(requests: Sequence[SampleRequest], lengths: np.ndarray) -> np.ndarray:
    """Order of arrival that gives both instances like lengths: neighbours in length come one after the other."""
    pairs = np.argsort(lengths, kind="stable").reshape(len(requests) // 2, 2)
    pairs[1::2] = pairs[1::2, ::-1]
    return np.random.default_rng(0).permutation(pairs).ravel()


def measured_curve(pool: ActorPool, workload: Workload, batches: Sequence[int]) -> RateCurve:
    """Goodput over running samples with all instances busy, as many samples on each."""
    samples: list[float] = []
    rates: list[float] = []
    for batch in batches:
        # a queue of twice as many keeps the batch full for most of the time
        count = len(pool.handles) * max(3 * batch, 6)
        outcome = pool.rollout(requests_of(workload, count, first_index=500_000), num_slots=batch)
        for stats in outcome.stats.values():
            samples.append(stats.num_sample_steps / stats.num_decode_steps)
            rates.append(stats.num_emitted_tokens / stats.busy_s)
    return RateCurve(samples, rates)


def overhead_share(outcome: RolloutOutcome) -> float:
    """Decode-thread seconds of selection and migration over generation seconds."""
    stats = list(outcome.stats.values())
    busy_s = sum(each.busy_s + each.move_s for each in stats)
    return sum(each.select_s + each.move_s for each in stats) / busy_s
