"""Whole rollouts on two instances with lengths that we choose, under every way of placing samples.

A sample's length is forced: no stop token, and a limit of its own. The text goes on behind the answer, and drafts of it
are accepted much as before (2 to 3 tokens a step to some 700 tokens, on either pair). No policy knows a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.support.actor_pool import RolloutOutcome
from benchmarks.support.workload import Workload
from rlhfspec.core.records import SampleRequest
from rlhfspec.policies.reallocation.by_name import make_reallocation_policy
from rlhfspec.policies.reallocation.gate import Gate, GateMode
from rlhfspec.policies.reallocation.pool_records import ReallocationPolicy
from rlhfspec.policies.reallocation.rate_curve import RateCurve


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
