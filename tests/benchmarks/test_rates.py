"""What the rollout benchmark measures of instances, on instances whose pace is known: a line in their samples."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.moving.rates import Rates, measured_rates
from core.records import GenerationStats, Prompt, SampleKey, SampleRequest, SamplingParams, Stream

STEP_S, SAMPLE_S, PROMPT_TOKEN_S = 5e-3, 1e-3, 2e-4
LENGTHS = np.arange(10, 74)


class PacedPool:
    """Two instances that decode plainly: a step takes STEP_S and SAMPLE_S for every sample."""

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
        return SimpleNamespace(stats={f"gen-{k}": self._stats(lengths[k::2], pace) for k in range(2)})

    def _stats(self, lengths: np.ndarray, pace: float) -> GenerationStats:
        running = [int((lengths > step).sum()) for step in range(lengths.max())]
        return GenerationStats(
            num_decode_steps=len(running),
            num_sample_steps=sum(running),
            num_emitted_tokens=int(lengths.sum()),
            verify_s=sum(STEP_S + SAMPLE_S * count for count in running) / pace,
            prefill_s=7 * PROMPT_TOKEN_S * len(lengths) / pace,
        )


def workload(num_prompts: int = 10) -> Any:
    """As much of a workload as is looked at: prompts of 7 tokens, and their requests."""
    sampling = SamplingParams(max_new_tokens=100)
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
    return measured_rates(pool, workload(), LENGTHS, (1, 4, 16))  # type: ignore[arg-type]


def test_the_curve_is_the_pace_of_the_instances_without_their_prompts() -> None:
    curve = rates(PacedPool()).curve
    for batch in (2, 6, 20):
        assert float(curve.seconds_per_token(batch)) == pytest.approx(STEP_S + SAMPLE_S * batch, rel=0.05)


@pytest.mark.parametrize("speedup", [1.0, 1.4])
def test_how_much_faster_an_instance_is_alone(speedup: float) -> None:
    assert rates(PacedPool(alone_speedup=speedup)).alone_speedup == pytest.approx(speedup)


def test_prompts_have_a_price_of_their_own() -> None:
    assert rates(PacedPool()).prompt_token_s == pytest.approx(PROMPT_TOKEN_S)


@pytest.mark.parametrize("pace", [0.7, 1.0, 1.3])
def test_a_look_at_the_pace_scales_the_whole_curve_and_leaves_the_measured_one(pace: float) -> None:
    measured = rates(PacedPool())
    now = measured.at_this_pace(PacedPool(pace=pace), workload(), LENGTHS)  # type: ignore[arg-type]
    for batch in (1, 16, 64):
        assert float(now.curve.goodput(batch)) == pytest.approx(
            pace * float(measured.curve.goodput(batch)), rel=1e-3
        )
    assert measured.curve.factor == 1.0
