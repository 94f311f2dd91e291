"""The demo task's rollout: 32 prompts with long-tailed responses, beside Hugging Face; the cost of invariance."""

from __future__ import annotations

from benchmarks.support.timing import (
    Figures,
    Rate,
    engine_rate,
    hugging_face_rate,
    interleaved,
    new_engine,
    ratios,
)
from benchmarks.support.workload import Workload
from rlhfspec.core.config import SpeculationConfig

COST_BATCH_SIZE = 8


def rollout(workload: Workload, figures: Figures, rounds: int) -> None:
    """Keep `plain_over_hf_rollout` and `invariant_cost_b8`."""
    size = len(workload.prompts)
    hf = hugging_face_rate(
        workload.target("float32"),
        workload.requests(),
        batch_size=size,
        pad_token_id=workload.pad_token_id,
    )
    taken = interleaved({"ours": _plain(workload, size, "invariant"), "hf": hf}, max(rounds // 4, 1))
    figures.keep("plain_over_hf_rollout", ratios(taken, "ours", "hf"))
    taken = interleaved(
        {name: _plain(workload, COST_BATCH_SIZE, name) for name in ("fast", "invariant")}, rounds
    )
    figures.keep("invariant_cost_b8", [ratio - 1.0 for ratio in ratios(taken, "fast", "invariant")])


def _plain(workload: Workload, batch_size: int, numerics: str) -> Rate:
    engine = new_engine(
        workload.target("float32"),
        None,
        SpeculationConfig(policy="off"),
        batch_size=batch_size,
        max_total_tokens=workload.max_total_tokens,
        vocab_size=workload.vocab_size,
        numerics=numerics,
    )
    return engine_rate(engine, workload.requests())
