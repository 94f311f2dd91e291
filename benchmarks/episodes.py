"""Episodes of several turns change no bit: over two instances, drafted and moved, as on one without speculation.

The calculator task with a model that has learned nothing. Compared: tokens, log-probabilities, marks of what was
sampled, and why each episode ended.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from benchmarks.moving.exact import SPECULATION
from benchmarks.multiturn.calculator_task import calculator_config, calculator_workload, play_alone
from benchmarks.multiturn.over_instances import play_over
from benchmarks.support.actor_pool import ActorPool, bench_ray
from benchmarks.support.result import write_result
from rlhfspec.cluster.observe.console import PipeConsole
from rlhfspec.core.config import EngineConfig, ReallocationConfig, SpeculationConfig
from rlhfspec.core.records import Completion, SampleKey
from rlhfspec.engine.build import build_engine
from rlhfspec.policies.migration.move_messages import MoveOutcome
from rlhfspec.policies.reallocation.forced import ForcedMoves

EPISODES = {"quick": 24, "default": 100, "full": 400}
NEW_TOKENS = 320
ENGINE = EngineConfig(device="cpu", max_running_samples=64, probe=False)


def run(*, out: Path, mode: str, data: Path | None) -> int:
    """Run the benchmark; returns 0, or 1 when a bit changed or an episode was lost."""
    torch.set_num_threads(1)
    console = PipeConsole()
    with tempfile.TemporaryDirectory() as folder, bench_ray("bench-episodes"):
        workload = calculator_workload(Path(folder), EPISODES[mode], max_new_tokens=NEW_TOKENS)
        config, requests = calculator_config(workload), workload.requests()
        engine = build_engine(
            workload.target("float32"),
            None,
            engine=ENGINE.model_copy(update={"turn_cache_mb": 0.0}),
            speculation=SpeculationConfig(policy="off"),
            max_total_tokens=workload.max_total_tokens,
            vocab_size=workload.vocab_size,
        )
        expected = play_alone(engine, requests, config, workload.tokenizer)
        pool = ActorPool(
            workload,
            engine=ENGINE,
            speculation=SPECULATION,
            migration=ReallocationConfig(transfer_share=1.0),
        )
        try:
            policy = ForcedMoves(rate=0.3, seed=0, recompute_share=0.1)
            played = play_over(pool, workload, config, requests, reallocation=policy)
        finally:
            pool.close()
    figures = {
        "episodes": float(len(expected)),
        "mismatches": float(count_mismatches(played.completions, expected)),
        "moves": float(sum(move.outcome == MoveOutcome.MOVED for move in played.moves)),
        "alarms": float(len(played.alarms)),
        "tokens": float(sum(one.num_tokens for one in expected.values())),
        "prefill_tokens": float(played.num_prefill_tokens),
        "prefill_tokens_nothing_kept": float(engine.stats.num_prefill_tokens),
        "kept_tokens": float(played.num_kept_tokens),
        "seconds": played.seconds,
    } | {name.replace("environment/", ""): value for name, value in played.figures.items()}
    console.print(figures)
    console.print(f"written {write_result(out, 'episodes', figures, {}, {'mode': mode})}")
    return 1 if figures["mismatches"] or figures["alarms"] else 0


def count_mismatches(found: Mapping[SampleKey, Completion], expected: Mapping[SampleKey, Completion]) -> int:
    """Episodes that are missing or differ in any bit."""
    return sum(key not in found or not equal(found[key], one) for key, one in expected.items())


def equal(one: Completion, other: Completion) -> bool:
    """Whether two completions say the same, bit for bit."""
    names = ("token_ids", "policy_logprobs", "sampling_logprobs", "is_sampled")
    same = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
    return same and one.finish_reason == other.finish_reason
