"""What the rollout benchmark measures of instances whose pace is known: a line in samples and contexts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhfspec.actors.trace_events import TraceEvent
from rlhfspec.benchmarks.moving.rates import Rates, measured_rates, stretches_of
from rlhfspec.core.decode_records import GenerationStats
from rlhfspec.core.records import Prompt, SampleKey, SampleRequest, SamplingParams, Stream

STEP_S, SAMPLE_S, CONTEXT_TOKEN_S, PROMPT_TOKEN_S = 5e-3, 1e-3, 1e-6, 2e-4
LENGTHS = np.arange(10, 2000, 40)


class PacedPool:
    """Two instances that decode plainly: a step takes STEP_S, SAMPLE_S a sample, CONTEXT_TOKEN_S a token."""

    def __init__(self, *, pace: float = 1.0, alone_speedup: float = 1.0) -> None:
        self.handles = {"gen-0": None, "gen-1": None}
        self.pace, self.alone_speedup = pace, alone_speedup

    def rollout(self, requests: Sequence[SampleRequest], *, binding: str) -> Any:
        """As static binding does it: the i-th request belongs to the i-th instance."""
        assert binding == "static"
        assert len({request.key for request in requests}) == len(requests)
        lengths = np.array([request.sampling.max_new_tokens for request in requests])
        busy = sum(lengths[k::2].max() > 1 for k in range(2))
        pace = self.pace * (self.alone_speedup if busy == 1 else 1.0)
        names = [f"gen-{k}" for k in range(2)]
        return SimpleNamespace(
            stats={name: self._stats(lengths[k::2], pace) for k, name in enumerate(names)},
            spans={name: self._spans(lengths[k::2], pace) for k, name in enumerate(names)},
        )

    def _stats(self, lengths: np.ndarray, pace: float) -> GenerationStats:
        return GenerationStats(
            num_emitted_tokens=int(lengths.sum()), prefill_s=self._prefill_s(lengths, pace)
        )

    def _prefill_s(self, lengths: np.ndarray, pace: float) -> float:
        return 7 * PROMPT_TOKEN_S * len(lengths) / pace

    def _spans(self, lengths: np.ndarray, pace: float) -> list[TraceEvent]:
        """The first step prefills; a third of a step's time lies before it, as orders are taken."""
        spans, now_s = [], 100.0
        for step in range(lengths.max()):
            count = int((lengths > step).sum())
            context = count * (7 + step)
            seconds = (STEP_S + SAMPLE_S * count + CONTEXT_TOKEN_S * context) / pace
            admission_s = self._prefill_s(lengths, pace) if step == 0 else 0.0
            end_s = now_s + seconds + admission_s
            spans.append(TraceEvent("step", now_s + seconds / 3, end_s, "", count, count, context))
            now_s = end_s
        return spans


def workload(num_prompts: int = 10) -> Any:
    """As much of a workload as is looked at: prompts of 7 tokens, and their requests."""
    sampling = SamplingParams(max_new_tokens=2000)
    prompts = [Prompt(prompt_id=number, token_ids=np.arange(7)) for number in range(num_prompts)]
    requests = [
        SampleRequest(
            key=SampleKey(run_seed=0, stream=Stream.BENCH, sample_index=number),
            prompt=prompt,
            sampling=sampling,
        )
        for number, prompt in enumerate(prompts)
    ]
    return SimpleNamespace(prompts=prompts, sampling=sampling, requests=lambda: requests)


def rates(pool: PacedPool) -> Rates:
    return measured_rates(pool, workload(), LENGTHS, 2)  # type: ignore[arg-type]


def test_the_curve_is_the_pace_of_the_instances_without_their_prompts() -> None:
    curve = rates(PacedPool()).curve
    for batch, context in ((2, 200), (6, 6000), (20, 2000), (48, 90_000)):
        expected_s = STEP_S + SAMPLE_S * batch + CONTEXT_TOKEN_S * context
        assert float(curve.seconds_per_token(batch, context)) == pytest.approx(expected_s, rel=0.05)


@pytest.mark.parametrize("speedup", [1.0, 1.4])
def test_how_much_faster_an_instance_is_alone(speedup: float) -> None:
    measured = rates(PacedPool(alone_speedup=speedup))
    assert measured.alone_speedup == pytest.approx(speedup, rel=0.01)
    for batch, context in ((6, 6000), (48, 90_000)):
        both = [float(c.seconds_per_token(batch, context)) for c in (measured.curve, measured.alone_curve)]
        assert both[0] / both[1] == pytest.approx(speedup, rel=0.01)


def test_prompts_have_a_price_of_their_own() -> None:
    assert rates(PacedPool()).prompt_token_s == pytest.approx(PROMPT_TOKEN_S)


@pytest.mark.parametrize("pace", [0.7, 1.0, 1.3])
def test_a_look_at_the_pace_scales_the_whole_curve_and_leaves_the_measured_one(pace: float) -> None:
    measured = rates(PacedPool())
    now = measured.at_this_pace(PacedPool(pace=pace), workload(), LENGTHS)  # type: ignore[arg-type]
    for batch in (1, 16, 64):
        assert float(now.curve.goodput(batch)) == pytest.approx(
            pace * float(measured.curve.goodput(batch)), rel=0.03
        )
        assert float(now.alone_curve.goodput(batch) / measured.alone_curve.goodput(batch)) == pytest.approx(
            pace, rel=0.03
        )
    assert measured.curve.factor == measured.alone_curve.factor == 1.0


def test_what_lies_between_two_looks_is_simulated_at_their_mean() -> None:
    measured = rates(PacedPool())
    before, after = (
        measured.at_this_pace(PacedPool(pace=pace), workload(), LENGTHS)  # type: ignore[arg-type]
        for pace in (0.8, 1.25)
    )
    between = before.halfway_to(after)
    for curve, of_look, of_other in (
        (between.curve, before.curve, after.curve),
        (between.alone_curve, before.alone_curve, after.alone_curve),
    ):
        assert of_look.factor < 0.9 < 1.1 < of_other.factor
        assert curve.factor == pytest.approx((of_look.factor * of_other.factor) ** 0.5)
        assert float(curve.goodput(16)) == pytest.approx(float(measured.curve.goodput(16)), rel=0.03)


def test_steps_after_another_instance_is_done_do_not_count() -> None:
    long, short = ([TraceEvent("step", t, t + 1.0, "", 2, 5) for t in range(n)] for n in (9, 4))
    made = stretches_of([long, short])
    assert len(made.seconds) == 6 and made.num_tokens.sum() == 30 and made.seconds.sum() == 6.0


def test_an_admission_in_several_steps_does_not_count() -> None:
    sizes = (3, 6, 8, 8, 8, 5)
    made = stretches_of([[TraceEvent("step", t, t + 1.0, "", size, size) for t, size in enumerate(sizes)]])
    assert made.num_samples.tolist() == [8, 8, 5]


def test_short_steps_are_taken_together() -> None:
    steps = [TraceEvent("step", 0.05 * t, 0.05 * (t + 1), "", 4 - t // 5, 8, 100 * t) for t in range(10)]
    made = stretches_of([steps])
    assert made.seconds == pytest.approx([0.2, 0.2, 0.05]) and made.num_tokens.tolist() == [32, 32, 8]
    assert made.num_samples == pytest.approx([4, 3, 3]) and made.context_tokens == pytest.approx(
        [250, 650, 900]
    )
