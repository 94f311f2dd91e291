"""A decode step from inside: shares of forwards and of the draft, prefill beside Hugging Face, phases, peak memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.modeling_utils import PreTrainedModel

from ...cluster.plan.memory_plan import MemoryNeeds
from ...cluster.plan.model_files import model_shape
from ...cluster.plan.model_sizes import ModelShapes
from ...core.config import Config, EngineConfig, SpeculationConfig
from ...engine.build import build_engine
from ...engine.drafters.model_drafter import ModelDrafter
from ...engine.engine import Engine
from ...engine.model.forward_plan import TreePlan
from ...engine.model.runner import ModelRunner
from ...engine.weights.loading import load_hf_config
from ..support.processes import measured_in_a_process
from ..support.timing import Figures, interleaved, ratios
from ..support.workload import (
    PLAIN,
    Workload,
    first_layers,
    model_p,
    model_p_folder,
)
from .rates import PLANS

SHARE_BATCH_SIZE = 16
STEPS = 40
PREFILL_PROMPTS, PREFILL_TOKENS = 32, 256
GROUP_SIZE = 8


def step_shares(figures: Figures) -> list[dict[str, Any]]:
    """Keep `outside_forward_share_b16` (plain) and `_tree8_b16` on model P; return the steps' phases as rows."""
    rows = []
    for name, speculation in (("plain", PLAIN), ("tree8", PLANS["tree n=8 b=2"])):
        engine = _filled_engine(speculation)
        share = _outside_share(engine)
        figure = "outside_forward_share_b16" if name == "plain" else f"outside_forward_share_{name}_b16"
        figures.keep(figure, share)
        for record in list(engine.step_records)[-STEPS:]:
            phases = {"draft": record.draft_s, "verify": record.verify_s, "accept": record.accept_s}
            phases["other"] = record.other_s
            rows += [
                {"part": "step", "plan": name, "phase": phase, "seconds": s} for phase, s in phases.items()
            ]
    return rows


def _filled_engine(speculation: SpeculationConfig) -> Engine:
    """An engine of model P, its first layer as draft, that has decoded some steps of SHARE_BATCH_SIZE samples."""
    workload = model_p(SHARE_BATCH_SIZE, new_tokens=192)
    draft = first_layers(workload.draft("float32"), 1) if speculation.policy != "off" else None
    engine = workload.engine(speculation, draft, max_running_samples=SHARE_BATCH_SIZE)
    for request in workload.requests():
        engine.submit(request)
    for _ in range(5):
        engine.step()
    return engine


def draft_share(workload: Workload, figures: Figures, rounds: int) -> None:
    """Keep `draft_share_b8`: a draft forward's time over the target's, 8 samples, one token each."""
    rates = {
        "target": _forward_rate(workload, workload.target("float32")),
        "draft": _forward_rate(workload, workload.draft("float32")),
    }
    figures.keep("draft_share_b8", ratios(interleaved(rates, rounds), "target", "draft"))


def prefill(figures: Figures, rounds: int) -> None:
    """Keep `prefill_over_hf` (32 prompts of 256 tokens, model P) and a group's `group_prefill_tokens_over_prompt`."""
    workload = model_p(PREFILL_PROMPTS, prompt_tokens=PREFILL_TOKENS, new_tokens=1)
    model, requests = workload.target("float32"), workload.requests()
    ids = torch.stack([torch.from_numpy(request.prompt.token_ids) for request in requests])
    engine = workload.engine(max_running_samples=PREFILL_PROMPTS)

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
    group = [replace(request, prompt=requests[0].prompt) for request in requests[:GROUP_SIZE]]
    before = engine.stats.num_prefill_tokens
    engine.generate(group)
    computed = engine.stats.num_prefill_tokens - before
    figures.values["group_prefill_tokens_over_prompt"] = computed / (PREFILL_TOKENS - 1)


def _outside_share(engine: Engine) -> list[float]:
    """Share of each decode step spent outside model forwards."""
    inside = Stopwatch()
    engine.runner.logits = inside.around(engine.runner.logits)
    if isinstance(engine.drafter, ModelDrafter):
        engine.drafter.runner.logits = inside.around(engine.drafter.runner.logits)
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
        speculation=PLAIN,
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


PHASES = ("draft", "select", "verify", "accept", "compact", "other")
SHOWN = {
    "plain": PLAIN,
    "chain of 4": PLANS["chain n=4"],
    "tree of 8": PLANS["tree n=8 b=2"],
}


def step_breakdown(console: Console) -> list[dict[str, float | str]]:
    """Print and return median milliseconds of each phase on model P with a draft of one layer, 16 samples."""
    table = Table(title=f"a decode step, ms in the median of {STEPS} ({SHARE_BATCH_SIZE} samples, model P)")
    for column in ("plan", *PHASES, "step"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    rows: list[dict[str, float | str]] = []
    for name, speculation in SHOWN.items():
        milliseconds = {phase: 1e3 * seconds for phase, seconds in _phases(speculation).items()}
        rows.append({"plan": name, **milliseconds})
        table.add_row(name, *(f"{milliseconds[column]:.2f}" for column in (*PHASES, "step")))
    console.print(table)
    return rows


def _phases(speculation: SpeculationConfig) -> dict[str, float]:
    engine, compact = _filled_engine(speculation), Stopwatch()
    pools = [engine.runner.pool]
    if isinstance(engine.drafter, ModelDrafter):
        pools.append(engine.drafter.cache)
    for pool in pools:
        pool.make_dense = compact.around(pool.make_dense)
    taken: dict[str, list[float]] = {}
    for _ in range(STEPS):
        compact.seconds = 0.0
        engine.step()
        record = engine.step_records[-1]
        phases = {
            "draft": record.draft_s,
            "select": record.select_s,
            "verify": record.verify_s,
            "accept": record.accept_s - compact.seconds,
            "compact": compact.seconds,
            "other": record.other_s - record.select_s,
            "step": record.step_s,
        }
        for phase, seconds in phases.items():
            taken.setdefault(phase, []).append(seconds)
    return {phase: statistics.median(seconds) for phase, seconds in taken.items()}


SLOTS, TOKENS = 48, 640


def memory(cache_dir: Path, figures: Figures) -> None:
    """Keep `memory_plan_relative_error`, `memory_planned_bytes` and `memory_measured_bytes` (model P, plain)."""
    folder = model_p_folder(cache_dir)
    planned = _planned_bytes(folder)
    measured = measured_in_a_process(
        "engine", "rlhfspec.benchmarks.speed.peak", [str(folder), str(SLOTS), str(TOKENS)]
    )
    figures.values["memory_planned_bytes"] = float(planned)
    figures.values["memory_measured_bytes"] = float(measured)
    figures.values["memory_plan_relative_error"] = abs(planned - measured) / measured


def _planned_bytes(folder: Path) -> int:
    config = Config.model_validate(
        {
            "models": {"target": str(folder), "draft": None},
            "data": {"task": "chain"},
            "engine": {"max_running_samples": SLOTS, "device": "cpu"},
            "speculation": {"policy": "off", "drafter": "none"},
        }
    )
    shapes = ModelShapes(target=model_shape(load_hf_config(str(folder))))
    return MemoryNeeds(config, shapes, max_total_tokens=TOKENS).plan(object_store_bytes=0).generation_bytes
