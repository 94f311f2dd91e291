"""What two instances of this machine deliver, measured as a rollout runs them: the simulator's truth.

About B running samples are measured with twice as many at first, the longest of a rollout: when few samples run they
are the longest, and drafts deep in a response are accepted less often. Each measurement with all instances busy
stands beside one with a single busy instance. The machine's pace drifts by a fifth within minutes, so `at_this_pace`
looks again before each scene.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.moving.rollouts import requests_of
from benchmarks.support.actor_pool import ActorPool
from benchmarks.support.workload import Workload
from policies.reallocation.rate_curve import RateCurve

BATCHES = (1, 2, 4, 8, 16, 32, 64)
ALONE_BATCHES = (4, 16)
PACE_BATCH = 16
FIRST_INDEX = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was measured."""

    curve: RateCurve
    "goodput over running samples with all instances busy"
    alone_speedup: float
    "goodput of an instance while the others have nothing to do, over that of the curve"
    prompt_token_s: float
    "seconds for a prompt token at admission"

    def at_this_pace(self, pool: ActorPool, workload: Workload, lengths: np.ndarray) -> Rates:
        """The same rates scaled to what the machine delivers now, at PACE_BATCH samples."""
        points = _points(pool, workload, PACE_BATCH, lengths, busy=len(pool.handles))
        curve = self.curve.copy()
        curve.factor *= statistics.fmean(rate / float(self.curve.goodput(many)) for many, rate in points)
        return replace(self, curve=curve)


def measured_rates(
    pool: ActorPool, workload: Workload, lengths: np.ndarray, batches: Sequence[int] = BATCHES
) -> Rates:
    """Measure; `lengths` [n] are those of a rollout."""
    busy: list[tuple[float, float]] = []
    alone: list[float] = []
    for batch in batches:
        points = _points(pool, workload, batch, lengths, busy=len(pool.handles))
        busy += points
        if batch in ALONE_BATCHES:
            # beside each other in time: the pace drifts
            ((_, rate),) = _points(pool, workload, batch, lengths, busy=1)
            alone.append(rate / statistics.fmean(other for _, other in points))
    samples, rates = zip(*busy, strict=True)
    return Rates(
        curve=RateCurve(samples, rates),
        alone_speedup=statistics.fmean(alone) if alone else 1.0,
        prompt_token_s=_prompt_token_s(pool, workload),
    )


def _points(
    pool: ActorPool, workload: Workload, batch: int, lengths: np.ndarray, *, busy: int
) -> list[tuple[float, float]]:
    """(running samples in the mean, tokens per second) of each of the first `busy` instances."""
    longest = np.sort(lengths)[-2 * batch :]
    # an idle instance gets as many samples of one token each: binding is by number
    asked = np.ones((len(longest), len(pool.handles)), dtype=np.int64)
    asked[:, :busy] = longest[:, None]
    outcome = pool.rollout(
        requests_of(workload, asked.ravel(), first_index=FIRST_INDEX),
        binding="static",
    )
    most = sorted(outcome.stats.values(), key=lambda stats: -stats.num_emitted_tokens)[:busy]
    return [
        # prompts are charged by themselves
        (
            stats.num_sample_steps / stats.num_decode_steps,
            stats.num_emitted_tokens / (stats.busy_s - stats.prefill_s),
        )
        for stats in most
    ]


def _prompt_token_s(pool: ActorPool, workload: Workload) -> float:
    """Of as many prompts at once as a rollout admits."""
    lengths = np.ones(len(workload.prompts), dtype=np.int64)
    outcome = pool.rollout(requests_of(workload, lengths, first_index=FIRST_INDEX), binding="static")
    prompt_tokens = sum(len(prompt.token_ids) for prompt in workload.prompts)
    return sum(stats.prefill_s for stats in outcome.stats.values()) / prompt_tokens
