"""Rates side by side: fixed plans with three drafts, and beside llama.cpp's own speculation; a rollout plain.

And what invariance costs, and what memory that comes with a sample's length is worth: three engines on model P, plain,
through long-tailed responses. `reserved` has slots at full length, as many as the bytes hold; `paged` has eight times
the slots, and its samples share the bytes; `unlimited` has those slots and memory for all of them at full length.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers.modeling_utils import PreTrainedModel

from ...core.config import SpeculationConfig
from ...engine.admission import MB
from ..peers.client import Peer
from ..support.timing import (
    Figures,
    Rate,
    engine_rate,
    hugging_face_rate,
    interleaved,
    rate_rows,
    ratios,
)
from ..support.workload import NEW_TOKENS, PLAIN, Workload, model_p
from .plain import peer_rate, their_rate


def rollout(workload: Workload, figures: Figures, rounds: int) -> None:
    """Keep `plain_over_hf_rollout` and `invariant_cost_b8`."""
    contestants = {"ours": _our_rate(workload), "hf": their_rate(workload)}
    taken = interleaved(contestants, max(rounds // 2, 1))
    figures.keep("plain_over_hf_rollout", ratios(taken, "ours", "hf"))
    taken = interleaved(
        {name: _our_rate(workload, COST_BATCH_SIZE, numerics=name) for name in ("fast", "invariant")}, rounds
    )
    figures.keep("invariant_cost_b8", [ratio - 1.0 for ratio in ratios(taken, "fast", "invariant")])


def _our_rate(workload: Workload, batch_size: int | None = None, **settings: Any) -> Rate:
    """Of plain decoding, of all prompts at once by default."""
    size = batch_size or len(workload.prompts)
    return engine_rate(workload.engine(max_running_samples=size, **settings), workload.requests())


COST_BATCH_SIZE = 8
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
    *,
    hugging_face: bool,
) -> list[dict[str, Any]]:
    """Keep `spec_over_plain_b*`, `break_even_batch` and maybe `spec_over_hf_b*`; return all ratios as rows."""
    rows = []
    for draft in ("good", "weak", "useless"):
        best: dict[int, float] = {}
        for batch_size in batch_sizes if draft == "good" else _shared(batch_sizes, OTHER_DRAFT_BATCH_SIZES):
            plans = list(PLANS) if draft == "good" else list(OTHER_DRAFT_PLANS)
            contestants = _contestants(workload, draft, plans, batch_size, hugging_face=hugging_face)
            taken = interleaved(contestants, rounds)
            suffix = "" if draft == "good" else f"_{draft}"
            over_plain = {name: ratios(taken, name, "plain") for name in plans}
            chosen = max(over_plain, key=lambda name: sorted(over_plain[name])[rounds // 2])
            figure = f"spec_over_plain_b{batch_size}{suffix}"
            best[batch_size] = figures.keep(figure, over_plain[chosen])
            console.print(f"{draft} draft, B={batch_size}: best is {chosen}, {best[batch_size]:.2f}x plain")
            if "hf" in taken:
                figures.keep(f"spec_over_hf_b{batch_size}{suffix}", ratios(taken, chosen, "hf"))
            rows += rate_rows(taken, part="speculation", draft=draft, batch_size=batch_size)
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


def _contestants(
    workload: Workload, draft: str, plans: Sequence[str], batch_size: int, *, hugging_face: bool
) -> dict[str, Rate]:
    requests = workload.requests()[: max(8, min(2 * batch_size, len(workload.prompts)))]

    def rate(speculation: SpeculationConfig) -> Rate:
        model = make_draft(workload, draft) if speculation.policy != "off" else None
        return engine_rate(workload.engine(speculation, model, max_running_samples=batch_size), requests)

    rates = {"plain": rate(PLAIN)} | {name: rate(PLANS[name]) for name in plans}
    if hugging_face and draft == "good" and batch_size in HUGGING_FACE_BATCH_SIZES:
        rates["hf"] = hugging_face_rate(
            workload.target("float32"),
            requests,
            batch_size=batch_size,
            pad_token_id=workload.pad_token_id,
        )
    return rates


def speculation_beside_llama_cpp(
    workload: Workload, figures: Figures, rounds: int, console: Console, batch_sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Keep `spec_over_llama_cpp_b*` and `llama_cpp_spec_over_plain_b*`; return rates as rows.

    Both draft with the pair's draft at temperature 1, every response NEW_TOKENS long: ours by the best fixed plan,
    llama.cpp as it comes.
    """
    rows = []
    sampling = replace(workload.sampling, stop_token_ids=(), max_new_tokens=NEW_TOKENS)
    for size in batch_sizes:
        some = replace(workload, prompts=workload.prompts[:size], sampling=sampling)
        with ExitStack() as stack:
            contestants = {
                name: engine_rate(
                    some.engine(plan, some.draft("float32"), max_running_samples=size), some.requests()
                )
                for name, plan in PLANS.items()
            }
            for name, draft in (("llama.cpp", None), ("llama.cpp drafting", workload.paths.draft)):
                peer = Peer(
                    "llama_cpp",
                    workload.paths.target,
                    max_batch=size,
                    max_total_tokens=some.max_total_tokens,
                    draft=draft,
                )
                contestants[name] = peer_rate(stack.enter_context(peer), some)
            taken = interleaved(contestants, rounds)
        best = max(PLANS, key=lambda name: sum(taken[name]))
        figures.keep(f"llama_cpp_spec_over_plain_b{size}", ratios(taken, "llama.cpp drafting", "llama.cpp"))
        kept = figures.keep(f"spec_over_llama_cpp_b{size}", ratios(taken, best, "llama.cpp drafting"))
        console.print(f"B={size}: {best} is {kept:.2f}x llama.cpp's speculation")
        rows += rate_rows(taken, part="speculation beside llama.cpp", batch_size=size)
    return rows


def _shared(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [size for size in a if size in b]


RESERVED_SLOTS, PAGED_SLOTS = 4, 32
LONGEST, USUAL, SPREAD = 900, 70, 1.0
"New tokens: drawn from a lognormal distribution of this median and sigma, cut at the longest."
PAGED_PROMPT_TOKENS, NUM_SAMPLES = 32, 64


def paging(figures: Figures, rounds: int) -> None:
    """Keep `paged_over_reserved`, `paged_over_unlimited` and `paged_preemptions`, the last of one rollout."""
    workload = model_p(NUM_SAMPLES, prompt_tokens=PAGED_PROMPT_TOKENS, new_tokens=LONGEST)
    random = np.random.default_rng(7)
    lengths = np.minimum(random.lognormal(np.log(USUAL), SPREAD, NUM_SAMPLES).astype(int) + 1, LONGEST)
    requests = [
        replace(request, sampling=replace(request.sampling, max_new_tokens=int(length)))
        for request, length in zip(workload.requests(), lengths, strict=True)
    ]
    reserved = workload.engine(max_running_samples=RESERVED_SLOTS)
    paged = workload.engine(max_running_samples=PAGED_SLOTS, kv_cache_mb=reserved.runner.pool.num_bytes / MB)
    unlimited = workload.engine(max_running_samples=PAGED_SLOTS)
    engines = {"reserved": reserved, "paged": paged, "unlimited": unlimited}
    taken = interleaved({name: engine_rate(each, requests) for name, each in engines.items()}, rounds)
    figures.keep("paged_over_reserved", ratios(taken, "paged", "reserved"))
    figures.keep("paged_over_unlimited", ratios(taken, "paged", "unlimited"))
    figures.values["paged_preemptions"] = paged.stats.num_preemptions / (1 + 2 * rounds)
