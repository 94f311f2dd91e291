"""What two instances of this machine deliver, measured as a rollout runs them: the simulator's truth.

Goodput over the number of running samples comes from the decode steps of whole rollouts, in which few samples run at
the end and these are the longest. What contexts cost comes from rollouts of long samples beside them: as many samples
with longer contexts, whose caches take longer to read. Each rollout with all instances busy stands beside one with a
single busy instance. The machine's pace drifts by a fifth within minutes, and so does what its instances take from each
other, so `at_this_pace` looks again before and after each round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from ...actors.trace_events import TraceEvent
from ...policies.reallocation.rate_curve import RateCurve
from ..support.actor_pool import ActorPool
from ..support.workload import Workload
from .rollouts import requests_of

PACE_SAMPLES = 64
"Of each instance in a look at the pace."
BINS_PER_OCTAVE = 2
"Of numbers of running samples; stretches of a bin make one point of the curve."
STRETCH_S = 0.2
"Decode steps that follow each other are taken together up to so long: a single one emits few tokens, or many."
FIRST_INDEX = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """Decode steps without a prefill, some that follow each other taken together; [n] each."""

    num_steps: np.ndarray
    num_samples: np.ndarray
    "in the mean"
    context_tokens: np.ndarray
    "of all of them together, in the mean"
    num_tokens: np.ndarray
    "emitted"
    seconds: np.ndarray

    def curve(self) -> RateCurve:
        """Goodput over running samples and their contexts."""
        bins = np.floor(BINS_PER_OCTAVE * np.log2(self.num_samples)).astype(np.int64)
        columns = (
            self.num_steps,
            self.num_steps * self.num_samples,
            self.num_steps * self.context_tokens,
            self.num_tokens,
            self.seconds,
        )
        sums = np.stack([np.bincount(bins, column) for column in columns])
        steps, samples, context, tokens, seconds = sums[:, np.bincount(bins) > 0]
        points = samples / steps
        return RateCurve(
            points.tolist(),
            (tokens / seconds).tolist(),
            context_tokens=(context / steps).tolist(),
            # a sample gets several tokens for one reading
            context_token_s=(self._read_s(points) * samples / tokens).tolist(),
        )

    def over(self, curve: RateCurve) -> float:
        """How many times as fast these steps were as the curve has it."""
        expected_s = self.num_tokens / curve.goodput(self.num_samples, self.context_tokens)
        return float(expected_s.sum() / self.seconds.sum())

    def _read_s(self, points: np.ndarray) -> float:
        """What a token of context adds to a decode step, beside a line between any two numbers of samples."""
        hats = np.stack([np.interp(self.num_samples, points, hat) for hat in np.eye(len(points))], axis=1)
        features = np.concatenate([hats, self.context_tokens[:, None]], axis=1)
        step_s = self.seconds / self.num_steps
        # relative errors: every number of samples counts alike
        fitted = np.linalg.lstsq(features / step_s[:, None], np.ones(len(step_s)), rcond=None)[0]
        return max(float(fitted[-1]), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was measured."""

    curve: RateCurve
    "goodput over running samples with all instances busy"
    alone_curve: RateCurve
    "while the others have nothing to do: instances of one machine share its caches and memory"
    alone_speedup: float
    "the latter over the former, in the mean over a rollout"
    prompt_token_s: float
    "seconds for a prompt token at admission"

    def at_this_pace(self, pool: ActorPool, workload: Workload, lengths: np.ndarray) -> Rates:
        """Either curve scaled to what the machine delivers now, for the longer half of the lengths.

        The longer a sample is, the longer it runs: most of those that run at any time are of that half.
        """
        longer_half = np.sort(lengths)[len(lengths) // 2 :]
        asked = longer_half[:: max(len(longer_half) // PACE_SAMPLES, 1)]
        return self._scaled(
            _stretches(pool, workload, asked, busy=len(pool.handles)).over(self.curve),
            _stretches(pool, workload, asked, busy=1).over(self.alone_curve),
        )

    def halfway_to(self, later: Rates) -> Rates:
        """The pace between two looks: what was played in between is simulated at their mean."""
        return self._scaled(
            math.sqrt(later.curve.factor / self.curve.factor),
            math.sqrt(later.alone_curve.factor / self.alone_curve.factor),
        )

    def _scaled(self, busy: float, alone: float) -> Rates:
        curve, alone_curve = self.curve.copy(), self.alone_curve.copy()
        curve.factor *= busy
        alone_curve.factor *= alone
        return replace(self, curve=curve, alone_curve=alone_curve)


def measured_rates(pool: ActorPool, workload: Workload, lengths: np.ndarray, rounds: int) -> Rates:
    """Measure; `lengths` [n] are those of one instance's samples in a rollout."""
    busy: list[Stretches] = []
    alone: list[Stretches] = []
    longer_half = np.repeat(np.sort(lengths)[len(lengths) // 2 :], 2)
    for _ in range(rounds):
        # beside each other in time: the pace drifts
        for asked in (lengths, longer_half):
            busy.append(_stretches(pool, workload, asked, busy=len(pool.handles)))
            alone.append(_stretches(pool, workload, asked, busy=1))
    curve = _join(busy).curve()
    return Rates(
        curve=curve,
        alone_curve=_join(alone).curve(),
        alone_speedup=_join(alone).over(curve) / _join(busy).over(curve),
        prompt_token_s=_prompt_token_s(pool, workload),
    )


def _stretches(pool: ActorPool, workload: Workload, lengths: np.ndarray, *, busy: int) -> Stretches:
    """Of the first `busy` instances while all of them decode, each with samples of these lengths."""
    # an idle instance gets as many samples of one token each: binding is by number
    asked = np.ones((len(lengths), len(pool.handles)), dtype=np.int64)
    asked[:, :busy] = lengths[:, None]
    outcome = pool.rollout(
        requests_of(workload, asked.ravel(), first_index=FIRST_INDEX),
        binding="static",
    )
    most = sorted(outcome.stats, key=lambda name: -outcome.stats[name].num_emitted_tokens)[:busy]
    return stretches_of([outcome.spans[name] for name in most])


def stretches_of(instances: Sequence[Sequence[TraceEvent]]) -> Stretches:
    """The decode steps of instances until the first of them is done, without those that admit samples."""
    lanes = [[span for span in spans if span.kind == "step"] for spans in instances]
    until_s = min(steps[-1].end_s for steps in lanes)
    return _join([_of_lane([step for step in steps if step.end_s <= until_s]) for steps in lanes])


def _of_lane(steps: Sequence[TraceEvent]) -> Stretches:
    admitted = int(np.argmax([step.num_samples for step in steps]))
    # from the end of the one before: what lies between two steps counts too
    ends_s = np.array([step.end_s for step in steps[admitted:]])
    seconds = np.diff(ends_s)
    rows = np.array([(1, s.num_samples, s.context_tokens, s.num_tokens) for s in steps[admitted + 1 :]])
    before_s = ends_s[:-1] - ends_s[0]
    _, first = np.unique(np.floor(before_s / STRETCH_S), return_index=True)
    count, samples, context, tokens = np.add.reduceat(rows.astype(float), first).T
    return Stretches(
        num_steps=count,
        num_samples=samples / count,
        context_tokens=context / count,
        num_tokens=tokens,
        seconds=np.add.reduceat(seconds, first),
    )


def _join(parts: Sequence[Stretches]) -> Stretches:
    columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(Stretches)}
    return Stretches(**{name: np.concatenate(values) for name, values in columns.items()})


def _prompt_token_s(pool: ActorPool, workload: Workload) -> float:
    """Of as many prompts at once as a rollout admits."""
    lengths = np.ones(len(workload.prompts), dtype=np.int64)
    outcome = pool.rollout(requests_of(workload, lengths, first_index=FIRST_INDEX), binding="static")
    prompt_tokens = sum(len(prompt.token_ids) for prompt in workload.prompts)
    return sum(stats.prefill_s for stats in outcome.stats.values()) / prompt_tokens
