"""Where a decode step's time goes: the forwards' share, the draft's share, prefill beside Hugging Face."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from benchmarks.speed.speculation import PLANS
from benchmarks.support.timing import Figures, interleaved, new_engine, plain_engine, ratios
from benchmarks.support.workload import VOCAB_SIZE, Workload, model_p_folder, model_p_requests
from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.records import SampleRequest
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.drafters.model_drafter import ModelDrafter
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.model.forward_plan import TreePlan
from rlhfspec.engine.model.runner import ModelRunner
from rlhfspec.engine.weights.loading import load_causal_lm

SHARE_BATCH_SIZE = 16
STEPS = 40
PREFILL_PROMPTS, PREFILL_TOKENS = 32, 256
GROUP_SIZE = 8


def step_shares(cache_dir: Path, figures: Figures) -> list[dict[str, Any]]:
    """Keep `outside_forward_share_b16` (plain) and `_tree8_b16` on model P; return the steps' phases as rows."""
    rows = []
    for name, speculation in (
        ("plain", SpeculationConfig(policy="off")),
        ("tree8", PLANS["tree n=8 b=2"]),
    ):
        engine = share_engine(cache_dir, speculation)
        share = _outside_share(engine, model_p_requests(SHARE_BATCH_SIZE, new_tokens=192))
        figure = "outside_forward_share_b16" if name == "plain" else f"outside_forward_share_{name}_b16"
        figures.keep(figure, share)
        for record in list(engine.step_records)[-STEPS:]:
            phases = {"draft": record.draft_s, "verify": record.verify_s, "accept": record.accept_s}
            phases["other"] = record.other_s
            rows += [
                {"part": "step", "plan": name, "phase": phase, "seconds": s} for phase, s in phases.items()
            ]
    return rows


def share_engine(cache_dir: Path, speculation: SpeculationConfig) -> Engine:
    """Return an engine of model P and its first layer as draft, for SHARE_BATCH_SIZE samples."""
    folder = str(model_p_folder(cache_dir))
    return new_engine(
        load_causal_lm(folder, "float32"),
        _first_layers(load_causal_lm(folder, "float32"), 1),
        speculation,
        batch_size=SHARE_BATCH_SIZE,
        max_total_tokens=256,
        vocab_size=VOCAB_SIZE,
    )


def draft_share(workload: Workload, figures: Figures, rounds: int) -> None:
    """Keep `draft_share_b8`: a draft forward's time over the target's, 8 samples, one token each."""
    rates = {
        "target": _forward_rate(workload, workload.target("float32")),
        "draft": _forward_rate(workload, workload.draft("float32")),
    }
    figures.keep("draft_share_b8", ratios(interleaved(rates, rounds), "target", "draft"))


def prefill(cache_dir: Path, figures: Figures, rounds: int) -> None:
    """Keep `prefill_over_hf` (32 prompts of 256 tokens, model P) and a group's `group_prefill_tokens_over_prompt`."""
    folder = model_p_folder(cache_dir)
    model = load_causal_lm(str(folder), "float32")
    requests = model_p_requests(PREFILL_PROMPTS, prompt_tokens=PREFILL_TOKENS, new_tokens=1)
    ids = torch.stack([torch.from_numpy(request.prompt.token_ids) for request in requests])
    engine = plain_engine(
        folder,
        "float32",
        batch_size=PREFILL_PROMPTS,
        max_total_tokens=PREFILL_TOKENS + 1,
        vocab_size=VOCAB_SIZE,
    )

    @torch.inference_mode()
    def hugging_face() -> float:
        started = time.perf_counter()
        model(ids, logits_to_keep=1)
        return ids.numel() / (time.perf_counter() - started)

    def ours() -> float:
        before = engine.stats.prefill_s
        engine.generate(requests)
        return (ids.numel() - len(ids)) / (engine.stats.prefill_s - before)

    taken = interleaved({"ours": ours, "hf": hugging_face}, rounds)
    figures.keep("prefill_over_hf", ratios(taken, "ours", "hf"))
    group = [
        SampleRequest(key=request.key, prompt=requests[0].prompt, sampling=request.sampling)
        for request in requests[:GROUP_SIZE]
    ]
    before = engine.stats.num_prefill_tokens
    engine.generate(group)
    computed = engine.stats.num_prefill_tokens - before
    figures.values["group_prefill_tokens_over_prompt"] = computed / (PREFILL_TOKENS - 1)


def _outside_share(engine: Engine, requests: list[SampleRequest]) -> list[float]:
    """Share of each decode step spent outside model forwards."""
    inside = Stopwatch()
    engine.runner.logits = inside.around(engine.runner.logits)
    if isinstance(engine.drafter, ModelDrafter):
        engine.drafter.runner.logits = inside.around(engine.drafter.runner.logits)
    for request in requests:
        engine.submit(request)
    for _ in range(5):
        engine.step()
    shares = []
    for _ in range(STEPS):
        inside.seconds = 0.0
        started = time.perf_counter()
        engine.step()
        shares.append(1.0 - inside.seconds / (time.perf_counter() - started))
    return shares


class Stopwatch:
    """Adds up the time spent in the functions it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            result = function(*args)
            self.seconds += time.perf_counter() - started
            return result

        return timed


def _forward_rate(workload: Workload, model: PreTrainedModel) -> Callable[[], float]:
    """Forwards of 8 samples, one token each, 64 tokens of context, per second."""
    runner = build_engine(
        model,
        None,
        engine=EngineConfig(max_running_samples=8),
        speculation=SpeculationConfig(policy="off"),
        max_total_tokens=workload.max_total_tokens,
        vocab_size=workload.vocab_size,
    ).runner

    def rate() -> float:
        seconds = [_forward_s(runner, 64) for _ in range(60)]
        return 1.0 / statistics.median(seconds)

    return rate


def _forward_s(runner: ModelRunner, context: int) -> float:
    base = torch.full((8,), context)
    plan = TreePlan(
        pool=runner.pool,
        attention=runner.attention,
        base=base,
        num_tokens=1,
        view_tokens=context + 1,
    )
    started = time.perf_counter()
    runner.logits(torch.zeros(8, dtype=torch.int64), base, plan)
    return time.perf_counter() - started


def _first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """The model cut behind its first layers: a draft of the same vocabulary."""
    model.base_model.layers = model.base_model.layers[:count]  # type: ignore[union-attr,index]
    model.config.num_hidden_layers = count
    return model
