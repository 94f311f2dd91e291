"""Fixed plans on the demo pair beside plain decoding and Hugging Face, with a good, a weak and a useless draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from transformers.modeling_utils import PreTrainedModel

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

PLANS: dict[str, SpeculationConfig] = {
    "chain n=2": SpeculationConfig(policy="fixed", num_nodes=2),
    "chain n=4": SpeculationConfig(policy="fixed", num_nodes=4),
    "chain n=8": SpeculationConfig(policy="fixed", num_nodes=8),
    "tree n=8 b=2": SpeculationConfig(policy="fixed", num_nodes=8, depth=5, branching=2),
}
OTHER_DRAFT_PLANS = ("chain n=2", "chain n=4")
BATCH_SIZES = (1, 4, 8, 16, 32)
OTHER_DRAFT_BATCH_SIZES = (1, 8, 32)
HUGGING_FACE_BATCH_SIZES = (1, 8, 16)
WEAK_NOISE = 0.6
"Noise added to a draft's matrices, in units of their standard deviation: the weak draft."


def speculation(
    workload: Workload,
    figures: Figures,
    rounds: int,
    console: Console,
    batch_sizes: Sequence[int] = BATCH_SIZES,
) -> list[dict[str, Any]]:
    """Keep `spec_over_hf_b*`, `spec_over_plain_b*` and `break_even_batch`; return all ratios as rows."""
    rows = []
    for draft in ("good", "weak", "useless"):
        best: dict[int, float] = {}
        for batch_size in batch_sizes if draft == "good" else _shared(batch_sizes, OTHER_DRAFT_BATCH_SIZES):
            plans = list(PLANS) if draft == "good" else list(OTHER_DRAFT_PLANS)
            taken = interleaved(_contestants(workload, draft, plans, batch_size), rounds)
            suffix = "" if draft == "good" else f"_{draft}"
            over_plain = {name: ratios(taken, name, "plain") for name in plans}
            chosen = max(over_plain, key=lambda name: sorted(over_plain[name])[rounds // 2])
            figure = f"spec_over_plain_b{batch_size}{suffix}"
            best[batch_size] = figures.keep(figure, over_plain[chosen])
            console.print(f"{draft} draft, B={batch_size}: best is {chosen}, {best[batch_size]:.2f}x plain")
            if "hf" in taken:
                figures.keep(f"spec_over_hf_b{batch_size}{suffix}", ratios(taken, chosen, "hf"))
            rows += [
                {
                    "part": "speculation",
                    "draft": draft,
                    "contestant": name,
                    "batch_size": batch_size,
                    "tokens_per_s": value,
                }
                for name, values in taken.items()
                for value in values
            ]
        if draft == "good":
            losing = [size for size, ratio in best.items() if ratio <= 1.0]
            # no loss seen: reported as the first power of two beyond what was measured
            figures.values["break_even_batch"] = float(min(losing, default=2 * max(best)))
    return rows


def make_draft(workload: Workload, draft: str) -> PreTrainedModel:
    """The pair's draft model; with noise on its matrices; with random weights."""
    model = workload.draft("float32")
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2 and draft == "weak":
                weight.add_(torch.randn_like(weight) * weight.std() * WEAK_NOISE)
            elif weight.dim() == 2 and draft == "useless":
                weight.copy_(torch.randn_like(weight) * weight.std())
    return model


def _contestants(workload: Workload, draft: str, plans: Sequence[str], batch_size: int) -> dict[str, Rate]:
    requests = workload.requests()[: max(8, min(2 * batch_size, len(workload.prompts)))]

    def rate(speculation: SpeculationConfig) -> Rate:
        engine = new_engine(
            workload.target("float32"),
            make_draft(workload, draft),
            speculation,
            batch_size=batch_size,
            max_total_tokens=workload.max_total_tokens,
            vocab_size=workload.vocab_size,
        )
        return engine_rate(engine, requests)

    rates = {"plain": rate(SpeculationConfig(policy="off"))}
    rates |= {name: rate(PLANS[name]) for name in plans}
    if draft == "good" and batch_size in HUGGING_FACE_BATCH_SIZES:
        rates["hf"] = hugging_face_rate(
            workload.target("float32"),
            requests,
            batch_size=batch_size,
            pad_token_id=workload.pad_token_id,
        )
    return rates


def _shared(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [size for size in a if size in b]
