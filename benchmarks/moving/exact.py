"""Forced moves change no bit: whole rollouts of long samples, moved at random in both directions at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.support.actor_pool import ActorPool
from benchmarks.support.workload import Workload
from rlhfspec.core.config import EngineConfig, ReallocationConfig, SpeculationConfig
from rlhfspec.core.records import Completion, SampleKey
from rlhfspec.policies.migration.move_messages import MoveOutcome
from rlhfspec.policies.reallocation.forced import ForcedMoves

SPECULATION = SpeculationConfig(policy="fixed", num_nodes=6, depth=4, branching=2)
MAX_ROLLOUTS = 12


@dataclass(slots=True, kw_only=True)
class ForcedRun:
    """What the rollouts together showed."""

    migrations: int = 0
    recomputations: int = 0
    kept: int = 0
    samples: int = 0
    mismatches: int = 0
    alarms: int = 0
    missing: int = 0
    most_moves_of_a_sample: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)


def forced_moves(workload: Workload, *, at_least: int, transport: str) -> ForcedRun:
    """Move until so many migrations have ended well; compare every sample with the run without moves."""
    workload = replace(
        workload, sampling=replace(workload.sampling, stop_token_ids=()), prompts=workload.prompts[:40]
    )
    pool = ActorPool(
        workload,
        engine=EngineConfig(max_running_samples=32, probe=False),
        speculation=SPECULATION,
        migration=ReallocationConfig(
            transport=transport,  # pyright: ignore[reportArgumentType]
            transfer_share=1.0,
        ),
    )
    run = ForcedRun()
    try:
        requests = workload.requests()
        expected = pool.rollout(requests).completions
        for seed in range(MAX_ROLLOUTS):
            policy = ForcedMoves(rate=0.3, seed=seed, recompute_share=0.1)
            outcome = pool.rollout(requests, reallocation=policy, interval_s=0.05)
            moved = [move for move in outcome.moves if move.outcome == MoveOutcome.MOVED]
            run.migrations += sum(move.order.mode == "migrate" for move in moved)
            run.recomputations += sum(move.order.mode == "recompute" for move in moved)
            run.kept += len(outcome.moves) - len(moved)
            run.outcomes.update(
                move.why_ended[:80] for move in outcome.moves if move.outcome != MoveOutcome.MOVED
            )
            run.samples += len(requests)
            run.alarms += len(outcome.alarms)
            run.missing += len(expected.keys() - outcome.completions.keys())
            run.mismatches += count_mismatches(outcome.completions, expected)
            of_sample = Counter(move.order.key for move in moved)
            run.most_moves_of_a_sample = max(run.most_moves_of_a_sample, *of_sample.values(), 0)
            if run.migrations >= at_least:
                break
    finally:
        pool.close()
    return run


def count_mismatches(found: Mapping[SampleKey, Completion], expected: Mapping[SampleKey, Completion]) -> int:
    """Samples whose tokens or log-probabilities differ in any bit."""
    return sum(
        not all(
            np.array_equal(getattr(completion, name), getattr(expected[key], name))
            for name in ("token_ids", "policy_logprobs", "sampling_logprobs")
        )
        for key, completion in found.items()
    )
