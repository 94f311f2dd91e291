"""What a decode step asks of a GPU: launches, copies and waits, counted without one; with one, times beside them.

Bars: a layer at most 11 launches, plain and verifying; outside recordings a plain step at most 12, a chain of 8 at
most 20, a tree of 8 at most 30, of 16 at most 40; one copy up and one down a step, waited for once.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from benchmarks.device.counted_steps import PLANS, counted, layer_launches
from benchmarks.support.result import write_result
from benchmarks.support.workload import demo_workload
from rlhfspec.cluster.observe.console import PipeConsole
from rlhfspec.core.config import EngineConfig
from rlhfspec.core.records import Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from rlhfspec.engine.build import build_engine

NEW_TOKENS = 64
BATCH = 8


def run(*, out: Path, mode: str, data: Path | None) -> int:
    """Run the benchmark; always returns 0. `data` is not used."""
    torch.set_num_threads(1)
    figures = count()
    if torch.cuda.is_available():
        figures |= measure()
    console = PipeConsole()
    console.print(figures)
    console.print(f"written {write_result(out, 'device_ops', figures, provenance={'mode': mode})}")
    return 0


def count() -> dict[str, float]:
    """Return launches a layer, and what a step asks for inside recordings and outside of them."""
    figures = {}
    for name, kernels in (("", True), ("_library", False)):
        for what, plan in (("plain", "plain"), ("verify", "tree8")):
            figures[f"launches_a_layer_{what}{name}"] = layer_launches(plan, kernels=kernels)
    for plan in PLANS:
        step = counted(plan)
        figures[f"launches_outside_{plan}"] = step["launches"]
        figures[f"launches_inside_{plan}"] = step["replayed"]
        figures[f"copies_up_{plan}"], figures[f"copies_down_{plan}"] = step["ups"], step["downs"]
        figures[f"blocking_copies_{plan}"] = step["waits"]
        figures[f"launches_unrecorded_{plan}"] = counted(plan, recorded=False)["launches"]
    return figures


def measure() -> dict[str, float]:
    """Return milliseconds of a decode step of the demo pair on the first GPU, by plan."""
    workload = demo_workload(BATCH)
    requests = [
        SampleRequest(
            key=SampleKey(run_seed=1, stream=Stream.BENCH, sample_index=index),
            prompt=Prompt(prompt_id=index, token_ids=prompt.token_ids),
            sampling=SamplingParams(max_new_tokens=NEW_TOKENS),
        )
        for index, prompt in enumerate(workload.prompts[:BATCH])
    ]
    figures = {}
    for plan, speculation in PLANS.items():
        engine = build_engine(
            workload.target("bfloat16"),
            workload.draft("bfloat16"),
            engine=EngineConfig(device="cuda", max_running_samples=BATCH, probe=False),
            speculation=speculation,
            max_total_tokens=workload.max_total_tokens,
            vocab_size=workload.vocab_size,
        )
        engine.generate(requests)
        torch.cuda.synchronize()
        steps, began = engine.stats.num_decode_steps, time.perf_counter()
        engine.generate(requests)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        figures[f"step_ms_{plan}"] = 1e3 * seconds / (engine.stats.num_decode_steps - steps)
    return figures
