"""Groups of samples to learn from: several responses a prompt, whose rewards alternate so that each has a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from benchmarks.support.workload import Workload
from rlhfspec.core.records import Completion, Reward, Rollout, SampleRequest

SAMPLES_PER_PROMPT = 2


def grouped_requests(workload: Workload, first_index: int = 0, **changes: float) -> list[SampleRequest]:
    """Two requests a prompt, one group after the other; keys from `first_index` on, sampling changed as said."""
    num_prompts = len(workload.prompts)
    lots = [
        workload.requests(first_index + lot * num_prompts, **changes) for lot in range(SAMPLES_PER_PROMPT)
    ]
    return [
        replace(request, group_id=group)
        for group, members in enumerate(zip(*lots, strict=True))
        for request in members
    ]


def alternating_rollouts(
    requests: Sequence[SampleRequest], completions: Iterable[Completion]
) -> list[Rollout]:
    """Completions of `grouped_requests`, in their order, with the rewards 0 and 1 in each group."""
    return [
        Rollout(
            prompt=request.prompt,
            completion=completion,
            response_text="",
            reward=Reward(value=float(number % SAMPLES_PER_PROMPT)),
        )
        for number, (request, completion) in enumerate(zip(requests, completions, strict=True))
    ]
