"""Sampler against trainer, bit by bit: two instances that draft and move samples all the time, then one update.

The trainer values log-probabilities by the engine's forward (`trainer.scoring: engine`), so those of the policy at the
update's start are the sampler's, the first ratio is 1, and the reference KL of version 0 is 0. After one update the
new weights go to the instances, rounded to their type, and all is compared again.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import ray

from benchmarks.moving.forced import ForcedMoves
from benchmarks.support.actor_pool import ActorPool, bench_ray
from benchmarks.support.harness import Bench
from benchmarks.support.workload import (
    SAMPLES_PER_PROMPT,
    Workload,
    alternating_rollouts,
    demo_workload,
    grouped_requests,
    real_workload,
)
from benchmarks.update import learner_of
from rlhfspec.cluster.observe.console import PipeConsole
from rlhfspec.cluster.weights.publish import PublishedWeights, publish
from rlhfspec.core.config import (
    AlgorithmConfig,
    EngineConfig,
    ReallocationConfig,
    SpeculationConfig,
    TrainerConfig,
)
from rlhfspec.core.records import Rollout, SampleRequest
from rlhfspec.engine.weights.causal_lm import DTYPES
from rlhfspec.engine.weights.chunks import pack_tensors
from rlhfspec.learning.trainer.learner import Learner
from rlhfspec.policies.migration.move_messages import MoveOutcome

DTYPE_NAMES = ("float32", "bfloat16")
KINDS = ("ppo", "grpo")
NUM_PROMPTS = {"quick": 4, "default": 16, "full": 64}
NUM_PROMPTS_REAL = {"quick": 2, "default": 24, "full": 64}
MAX_NEW_TOKENS_REAL = 96
ENGINE = EngineConfig(device="cpu", max_running_samples=16, probe=False)
TREE = SpeculationConfig(policy="fixed", num_nodes=4, depth=3, branching=2)
TEMPERATURE, TOP_P = 0.9, 0.95
TIMEOUT_S = 240.0
INTERVAL_S = {"demo": 0.05, "real": 0.5}
"Between forced moves: a decode step of the real model takes a tenth of a second."


@dataclass(slots=True)
class Tally:
    """Sums over everything compared."""

    tokens: int = 0
    equal_tokens: float = 0.0
    moves: int = 0
    accepted_draft_tokens: int = 0
    first_ratio_error: float = 0.0
    "of the ratio furthest from 1 at a first minibatch"
    reference_kl: float = 0.0
    "largest at version 0"
    updates: int = 0
    by_kind: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, figures: dict[str, float], num_tokens: int, what: str, *, is_first: bool) -> None:
        """Count one update."""
        share = figures["mismatch/bit_equal_share"]
        self.tokens += num_tokens
        self.equal_tokens += share * num_tokens
        self.updates += 1
        self.by_kind[what].append(share)
        self.first_ratio_error = max(
            self.first_ratio_error, abs(figures.get("ratio_at_first_minibatch", 1.0) - 1.0)
        )
        if is_first:
            self.reference_kl = max(self.reference_kl, abs(figures["reference_kl"]))


def run(*, out: Path, mode: str, data: Path | None, real: bool = False) -> int:
    """Write OUT/onpolicy.json, with `real` OUT/onpolicy_real.json; returns 1 when anything differed."""
    bench = Bench("onpolicy_real" if real else "onpolicy", out=out, mode=mode, data=data)
    console, tally, suffix = bench.console, Tally(), "real" if real else "demo"
    if real:
        workload = real_workload(
            NUM_PROMPTS_REAL[mode], data=data, max_new_tokens=MAX_NEW_TOKENS_REAL, console=console
        )
        if workload is None:
            return 0
    else:
        workload = demo_workload(NUM_PROMPTS[mode])
    with bench_ray("bench-onpolicy"):
        for dtype in DTYPE_NAMES:
            _compare(workload, dtype, tally, INTERVAL_S[suffix], console)
    share = tally.equal_tokens / tally.tokens
    bench.figures.values = {
        f"bit_equal_share_{suffix}": share,
        f"tokens_{suffix}": float(tally.tokens),
        f"first_ratio_error_{suffix}": tally.first_ratio_error,
        f"reference_kl_{suffix}": tally.reference_kl,
        f"moves_{suffix}": float(tally.moves),
        f"accepted_draft_tokens_{suffix}": float(tally.accepted_draft_tokens),
        f"updates_{suffix}": float(tally.updates),
    } | {f"{what}_share_{suffix}": statistics.fmean(shares) for what, shares in tally.by_kind.items()}
    bench.write(temperature=TEMPERATURE, top_p=TOP_P, samples_per_prompt=SAMPLES_PER_PROMPT)
    exact = share == 1.0 and tally.first_ratio_error == 0.0 and tally.reference_kl == 0.0
    return 0 if exact and tally.moves > 0 else 1


def _compare(workload: Workload, dtype: str, tally: Tally, interval_s: float, console: PipeConsole) -> None:
    """Both algorithms learn from one pool's samples, version 0 first and then each its own version 1."""
    with ActorPool(
        workload,
        engine=ENGINE,
        speculation=TREE,
        dtype=dtype,
        migration=ReallocationConfig(transfer_share=1.0),
    ) as pool:
        first = _sampled(workload, pool, 0, tally, interval_s)
        for number, kind in enumerate(KINDS, start=1):
            learner = _learner(workload, kind, dtype)
            for version in range(2):
                rollouts = first if version == 0 else _sampled(workload, pool, number, tally, interval_s)
                num_tokens = sum(one.completion.num_tokens for one in rollouts)
                figures = learner.update(rollouts).figures
                tally.add(figures, num_tokens, f"{kind}_{dtype}", is_first=version == 0)
                console.print(
                    f"{dtype} {kind} version {version}: {num_tokens:,} tokens, {tally.moves} moves so far, "
                    f"share {figures['mismatch/bit_equal_share']}"
                )
                if version == 0:
                    _publish(workload, pool, learner, dtype, weight_version=number)


def _sampled(
    workload: Workload, pool: ActorPool, number: int, tally: Tally, interval_s: float
) -> list[Rollout]:
    """One rollout under forced moves; rewards alternate, so every sample has a gradient."""
    requests = _requests(workload, number)
    moves = ForcedMoves(rate=0.3, seed=number, recompute_share=0.1)
    outcome = pool.rollout(requests, reallocation=moves, interval_s=interval_s)
    tally.moves += sum(move.outcome == MoveOutcome.MOVED for move in outcome.moves)
    tally.accepted_draft_tokens += sum(one.num_accepted_tokens for one in outcome.completions.values())
    return alternating_rollouts(requests, [outcome.completions[request.key] for request in requests])


def _requests(workload: Workload, number: int) -> list[SampleRequest]:
    """Of one rollout; no stop tokens, so that samples live long enough to move."""
    first_index = number * SAMPLES_PER_PROMPT * len(workload.prompts)
    return [
        replace(request, sampling=replace(request.sampling, stop_token_ids=()))
        for request in grouped_requests(workload, first_index, temperature=TEMPERATURE, top_p=TOP_P)
    ]


def _learner(workload: Workload, kind: str, dtype: str) -> Learner:
    trainer = TrainerConfig(
        learning_rate=1e-4, minibatch_size=16, max_tokens_per_forward=1024, num_threads=1, scoring="engine"
    )
    algorithm = AlgorithmConfig.model_validate({"kind": kind, "kl_coef": 0.01, "report_entropy": False})
    return learner_of(workload, trainer, algorithm=algorithm, scored_as=dtype, temperature=TEMPERATURE)


def _publish(
    workload: Workload, pool: ActorPool, learner: Learner, dtype: str, *, weight_version: int
) -> None:
    """The learner's weights, rounded to the instances' type."""
    model = workload.target(dtype)
    manifest, chunks = pack_tensors(
        [(name, tensor.to(DTYPES[dtype])) for name, tensor in learner.weights()],
        hf_config_json=model.config.to_json_string(use_diff=False),
        name="target",
        weight_version=weight_version,
    )
    weights = PublishedWeights(manifest=manifest, chunk_refs=tuple(ray.put(chunk) for chunk in chunks))
    publish(weights, pool.handles, timeout_s=TIMEOUT_S)
