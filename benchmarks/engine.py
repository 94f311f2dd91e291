"""Speed of plain decoding beside Hugging Face `generate`, and what invariant numerics cost.

Both sides decode the same prompts of the demo task to the same lengths with the same model, dtype and threads,
in turn (ABBA), and the figure is the median of the ratios of neighbours. Hugging Face samples its own responses,
so its tokens per second are counted over its own tokens: left-padded batch, finished samples stay in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console

from benchmarks.support.result import write_result
from benchmarks.support.workload import Workload, demo_workload
from core.config import EngineConfig, SpeculationConfig
from engine.build import build_engine
from engine.forward_plan import TreePlan
from engine.generator import Engine

ROLLOUT_PROMPTS = 32
PLANS: dict[str, SpeculationConfig] = {
    "plain": SpeculationConfig(policy="off"),
    "chain n=4": SpeculationConfig(num_nodes=4),
    "chain n=8": SpeculationConfig(num_nodes=8),
    "tree n=8 b=2": SpeculationConfig(num_nodes=8, depth=5, branching=2),
}
BATCH_SIZES = (1, 8, 32)


def run(*, out: Path, mode: str, data: Path | None) -> int:
    """Run the benchmark; returns 0."""
    torch.set_num_threads(1)
    console = Console()
    rounds = {"quick": 2, "default": 6, "full": 15}[mode]
    workload = demo_workload(ROLLOUT_PROMPTS)
    figures, intervals, rows = {}, {}, []

    rollout = _paired(_engine_rate(workload, "plain", ROLLOUT_PROMPTS), _hugging_face_rate(workload), rounds)
    _keep("plain_over_hf_rollout", rollout, figures, intervals)

    cost = _paired(
        _engine_rate(workload, "plain", 8, numerics="fast"), _engine_rate(workload, "plain", 8), rounds
    )
    _keep("fast_over_invariant_b8", cost, figures, intervals)
    figures["invariant_cost_b8"] = figures["fast_over_invariant_b8"] - 1.0

    for batch_size in BATCH_SIZES if mode != "quick" else BATCH_SIZES[1:2]:
        plain = _engine_rate(workload, "plain", batch_size)
        for name in list(PLANS)[1:]:
            ratio = _paired(_engine_rate(workload, name, batch_size), plain, max(rounds // 2, 1))
            figure = f"{_slug(name)}_over_plain_b{batch_size}"
            _keep(figure, ratio, figures, intervals)
            rows.append({"plan": name, "batch_size": batch_size, "over_plain": figures[figure]})
            console.print(f"{name} at B={batch_size}: {figures[figure]:.2f}x plain decoding")
    figures |= _speculation_figures(workload)
    pq.write_table(pa.Table.from_pylist(rows), out / "engine.parquet")
    write_result(out, "engine", figures, intervals, provenance={"mode": mode, "rounds": rounds})
    console.print(figures)
    return 0


Rate = Callable[[], float]
"Decode all prompts once; tokens per second."


def _engine_rate(
    workload: Workload, plan: str, batch_size: int, *, numerics: str = "invariant", dtype: str = "float32"
) -> Rate:
    engine = _engine(workload, plan, batch_size, numerics, dtype)

    def rate() -> float:
        before = engine.stats.num_emitted_tokens
        started = time.perf_counter()
        engine.generate(workload.requests())
        return (engine.stats.num_emitted_tokens - before) / (time.perf_counter() - started)

    return rate


def _engine(workload: Workload, plan: str, batch_size: int, numerics: str, dtype: str) -> Engine:
    speculation = PLANS[plan]
    config = EngineConfig.model_validate({"max_running_samples": batch_size, "numerics": numerics})
    return build_engine(
        workload.target(dtype),
        workload.draft(dtype) if speculation.policy != "off" else None,
        engine=config,
        speculation=speculation,
        max_total_tokens=workload.max_total_tokens,
        vocab_size=workload.vocab_size,
    )


def _hugging_face_rate(workload: Workload) -> Rate:
    """Hugging Face `generate` on all prompts at once, left-padded, T = 1."""
    model: Any = workload.target("float32")
    pad = workload.pad_token_id
    stop = list(workload.sampling.stop_token_ids)
    prompts = [prompt.token_ids for prompt in workload.prompts]
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, width - len(prompt) :] = 1

    @torch.inference_mode()
    def rate() -> float:
        torch.manual_seed(0)
        started = time.perf_counter()
        output = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=workload.sampling.max_new_tokens,
            pad_token_id=pad,
            eos_token_id=stop,
        )
        seconds = time.perf_counter() - started
        return _num_tokens(output[:, width:].numpy(), stop) / seconds

    return rate


def _num_tokens(responses: np.ndarray, stop: list[int]) -> int:
    """Tokens up to and with the first stop token of each row."""
    is_stop = np.isin(responses, stop)
    first = np.where(is_stop.any(1), is_stop.argmax(1) + 1, responses.shape[1])
    return int(first.sum())


def _paired(a: Rate, b: Rate, rounds: int) -> list[float]:
    """Ratios a / b from ABBA blocks; one warm-up of each is thrown away."""
    a()
    b()
    ratios = []
    for _ in range(rounds):
        first, second, third, fourth = a(), b(), b(), a()
        ratios.append((first + fourth) / (second + third))
    return ratios


def _keep(
    name: str,
    ratios: Sequence[float],
    figures: dict[str, float],
    intervals: dict[str, tuple[float, float]],
) -> None:
    """Store the median and a bootstrap 95% interval of it."""
    values = np.asarray(ratios)
    draws = np.random.default_rng(0).choice(values, size=(2000, len(values)))
    medians = np.median(draws, axis=1)
    figures[name] = statistics.median(ratios)
    intervals[name] = (float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975)))


def _speculation_figures(workload: Workload) -> dict[str, float]:
    """Mean acceptance length of a tree of 8, and the draft's share of the target's forward at B = 8."""
    engine = _engine(workload, "tree n=8 b=2", 8, "invariant", "float32")
    engine.generate(workload.requests())
    return {
        "mean_acceptance_length_tree8": engine.stats.mean_acceptance_length,
        "draft_share_b8": _forward_s(workload, "draft") / _forward_s(workload, "target"),
    }


def _forward_s(workload: Workload, model: str) -> float:
    """Median seconds of one plain forward of 8 samples, one token each, 64 tokens of context."""
    config = EngineConfig(max_running_samples=8)
    loaded = workload.target("float32") if model == "target" else workload.draft("float32")
    engine = build_engine(
        loaded,
        None,
        engine=config,
        speculation=SpeculationConfig(policy="off"),
        max_total_tokens=workload.max_total_tokens,
        vocab_size=workload.vocab_size,
    )
    runner, context = engine.runner, 64
    base = torch.full((8,), context)
    ids = torch.zeros(8, dtype=torch.int64)
    seconds = []
    for _ in range(60):
        plan = TreePlan(
            pool=runner.pool,
            attention=runner.attention,
            base=base,
            num_tokens=1,
            view_tokens=context + 1,
        )
        started = time.perf_counter()
        runner.logits(ids, base, plan)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[10:])


def _slug(name: str) -> str:
    return name.replace(" ", "_").replace("=", "")
