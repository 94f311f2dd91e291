"""What two instances of this machine deliver, measured as a rollout runs them: the simulator's truth.

Goodput over the number of running samples comes from the decode steps of whole rollouts, in which few samples run at
the end and these are the longest: drafts deep in a response are accepted less often. Each rollout with all instances
busy stands beside one with a single busy instance. The machine's pace drifts by a fifth within minutes, so
`at_this_pace` looks again before each scene.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from actors.spans import Span
from benchmarks.moving.rollouts import requests_of
from benchmarks.support.actor_pool import ActorPool
from benchmarks.support.workload import Workload
from policies.reallocation.rate_curve import RateCurve

PACE_SAMPLES = 32
"Of each instance in a look at the pace: the longest ones."
BINS_PER_OCTAVE = 2
"Of numbers of running samples; steps of a bin make one point of the curve."
FIRST_INDEX = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Decode steps without a prefill, [n] each."""

    num_samples: np.ndarray
    num_tokens: np.ndarray
    seconds: np.ndarray

    def curve(self) -> RateCurve:
        """Goodput over running samples."""
        bins = np.floor(BINS_PER_OCTAVE * np.log2(self.num_samples)).astype(np.int64)
        count, samples, tokens, seconds = (
            np.bincount(bins, weights) for weights in (None, self.num_samples, self.num_tokens, self.seconds)
        )
        known = tokens > 0
        return RateCurve((samples[known] / count[known]).tolist(), (tokens[known] / seconds[known]).tolist())

    def over(self, curve: RateCurve) -> float:
        """How many times as fast these steps were as the curve has it."""
        return float((self.num_tokens / curve.goodput(self.num_samples)).sum() / self.seconds.sum())


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
        """The same rates scaled to what the machine delivers now, for the longest of the lengths."""
        longest = np.sort(lengths)[-PACE_SAMPLES:]
        curve = self.curve.copy()
        curve.factor *= _steps(pool, workload, longest, busy=len(pool.handles)).over(self.curve)
        return replace(self, curve=curve)


def measured_rates(pool: ActorPool, workload: Workload, lengths: np.ndarray, rounds: int) -> Rates:
    """Measure; `lengths` [n] are those of one instance's samples in a rollout."""
    busy: list[Steps] = []
    alone: list[Steps] = []
    for _ in range(rounds):
        # beside each other in time: the pace drifts
        busy.append(_steps(pool, workload, lengths, busy=len(pool.handles)))
        alone.append(_steps(pool, workload, lengths, busy=1))
    curve = _join(busy).curve()
    return Rates(
        curve=curve,
        alone_speedup=_join(alone).over(curve),
        prompt_token_s=_prompt_token_s(pool, workload),
    )


def _steps(pool: ActorPool, workload: Workload, lengths: np.ndarray, *, busy: int) -> Steps:
    """Of the first `busy` instances while all of them decode, each with samples of these lengths."""
    # an idle instance gets as many samples of one token each: binding is by number
    asked = np.ones((len(lengths), len(pool.handles)), dtype=np.int64)
    asked[:, :busy] = lengths[:, None]
    outcome = pool.rollout(
        requests_of(workload, asked.ravel(), first_index=FIRST_INDEX),
        binding="static",
    )
    most = sorted(outcome.stats, key=lambda name: -outcome.stats[name].num_emitted_tokens)[:busy]
    return steps_of([outcome.spans[name] for name in most])


def steps_of(instances: Sequence[Sequence[Span]]) -> Steps:
    """The decode steps of instances until the first of them is done, without those that admit samples."""
    lanes = [[span for span in spans if span.kind == "step"] for spans in instances]
    until_s = min(steps[-1].end_s for steps in lanes)
    kept: list[tuple[int, int, float]] = []
    for steps in lanes:
        admitted = int(np.argmax([step.num_samples for step in steps]))
        # from the end of the one before: what lies between two steps counts too
        kept += [
            (step.num_samples, step.num_tokens, step.end_s - before.end_s)
            for before, step in pairwise(steps[admitted:])
            if step.end_s <= until_s
        ]
    num_samples, num_tokens, seconds = (np.array(column) for column in zip(*kept, strict=True))
    return Steps(num_samples=num_samples, num_tokens=num_tokens, seconds=seconds)


def _join(parts: Sequence[Steps]) -> Steps:
    return Steps(
        num_samples=np.concatenate([part.num_samples for part in parts]),
        num_tokens=np.concatenate([part.num_tokens for part in parts]),
        seconds=np.concatenate([part.seconds for part in parts]),
    )


def _prompt_token_s(pool: ActorPool, workload: Workload) -> float:
    """Of as many prompts at once as a rollout admits."""
    lengths = np.ones(len(workload.prompts), dtype=np.int64)
    outcome = pool.rollout(requests_of(workload, lengths, first_index=FIRST_INDEX), binding="static")
    prompt_tokens = sum(len(prompt.token_ids) for prompt in workload.prompts)
    return sum(stats.prefill_s for stats in outcome.stats.values()) / prompt_tokens
