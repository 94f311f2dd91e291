"""Whole long-tailed rollouts on one instance: every sample from its prompt to its end, prefill included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.adaptive.pairs import Contestant, engine_for
from benchmarks.support.timing import engine_rate, hugging_face_rate, interleaved
from benchmarks.support.workload import Workload
from rlhfspec.core.decode_records import GenerationStats
from rlhfspec.profiles.profile import Profile

SAMPLES = 64


def whole_rollout(
    workload: Workload,
    policies: Mapping[str, Contestant],
    profile: Profile,
    rounds: int,
    *,
    draft: str = "good",
    hugging_face: bool = False,
) -> tuple[dict[str, list[float]], GenerationStats]:
    """Return tokens per second of every round by policy, and the statistics of `goodput`."""
    requests = workload.requests()[:SAMPLES]
    engines = {
        name: engine_for(workload, contestant, batch_size=SAMPLES, draft=draft, profile=profile)
        for name, contestant in policies.items()
    }
    taken = interleaved({name: engine_rate(engine, requests) for name, engine in engines.items()}, rounds)
    if hugging_face:
        # seven times as slow as ours: taken next to the others, once a round
        rate = hugging_face_rate(
            workload.target("float32"), requests, batch_size=SAMPLES, pad_token_id=workload.pad_token_id
        )
        taken["hf"] = [rate() for _ in range(rounds)]
    return taken, engines["goodput"].stats


def best_of(taken: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """The fastest of some policies in the median."""
    return max(names, key=lambda name: sorted(taken[name])[len(taken[name]) // 2])
