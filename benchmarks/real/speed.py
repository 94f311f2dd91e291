"""Speed on the real model: plain decoding beside Hugging Face, and drafting without a trained draft.

Drafts come from the texts (suffixes) or from the target's own first layers; the adaptive policies may leave both.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from benchmarks.adaptive.batches import constant_batch
from benchmarks.adaptive.pairs import profile_of
from benchmarks.support.result import write_result
from benchmarks.support.timing import Figures, engine_rate, hugging_face_rate, interleaved, new_engine, ratios
from benchmarks.support.workload import DRAFT_LAYERS, real_workload
from rlhfspec.core.config import SpeculationConfig

MAX_NEW_TOKENS = {"quick": 32, "default": 96, "full": 128}
BATCH_SIZES = {"quick": (8,), "default": (1, 8, 16), "full": (1, 4, 8, 16, 32)}
ROUNDS = {"quick": 1, "default": 2, "full": 4}
PROFILE_S = {"quick": 12.0, "default": 40.0, "full": 60.0}
POLICIES = {
    "plain": SpeculationConfig(policy="off"),
    "suffix_chain2": SpeculationConfig(policy="fixed", drafter="suffix", num_nodes=2),
    "suffix_bandit": SpeculationConfig(policy="bandit", drafter="suffix"),
    "layers_chain2": SpeculationConfig(policy="fixed", num_nodes=2),
    "goodput": SpeculationConfig(policy="goodput"),
}


def run_engine(*, out: Path, mode: str, data: Path | None, console: Console) -> int:
    """Write OUT/engine_real.json: plain decoding over Hugging Face `generate`; returns 0."""
    sizes = BATCH_SIZES[mode]
    workload = real_workload(max(sizes), data=data, max_new_tokens=MAX_NEW_TOKENS[mode], console=console)
    if workload is None:
        return 0
    figures, rows = Figures(), []
    for size in sizes:
        requests = workload.requests()[:size]
        engine = new_engine(
            workload.target("float32"),
            None,
            POLICIES["plain"],
            batch_size=size,
            max_total_tokens=workload.max_total_tokens,
            vocab_size=workload.vocab_size,
        )
        contestants = {
            "ours": engine_rate(engine, requests),
            "hf": hugging_face_rate(
                workload.target("float32"), requests, batch_size=size, pad_token_id=workload.pad_token_id
            ),
        }
        taken = interleaved(contestants, ROUNDS[mode])
        figures.keep(f"plain_over_hf_b{size}_real", ratios(taken, "ours", "hf"))
        figures.values[f"plain_tokens_per_s_b{size}_real"] = statistics.median(taken["ours"])
        console.print(
            f"B={size}: { ({name: round(statistics.median(r), 1) for name, r in taken.items()}) } tokens/s"
        )
        rows += _rows("plain", size, taken)
    return _write(out, "engine_real", figures, rows, mode, data, console)


def run_drafting(*, out: Path, mode: str, data: Path | None, console: Console) -> int:
    """Write OUT/drafting_real.json: every policy over plain decoding; returns 0."""
    sizes = [size for size in BATCH_SIZES[mode] if size <= 16]
    workload = real_workload(
        2 * max(sizes) + 12, data=data, max_new_tokens=MAX_NEW_TOKENS[mode], console=console
    )
    if workload is None:
        return 0
    console.print(f"draft model: the first {DRAFT_LAYERS} layers of the target, untrained")
    profile = profile_of(workload, budget_s=PROFILE_S[mode]).profile
    figures, rows = Figures(), []
    for size in sizes:
        result = constant_batch(workload, POLICIES, profile, size, ROUNDS[mode])
        for name in POLICIES:
            if name != "plain":
                figures.keep(f"{name}_over_plain_b{size}_real", result.ratios(name, "plain"))
        console.print(f"B={size}: { {name: round(result.median(name), 1) for name in POLICIES} } tokens/s")
        rows += _rows("drafting", size, result.rates)
    return _write(out, "drafting_real", figures, rows, mode, data, console)


def _rows(part: str, size: int, rates: Any) -> list[dict[str, Any]]:
    return [
        {"part": part, "batch_size": size, "contestant": name, "tokens_per_s": value}
        for name, values in rates.items()
        for value in values
    ]


def _write(
    out: Path,
    name: str,
    figures: Figures,
    rows: list[dict[str, Any]],
    mode: str,
    data: Path | None,
    console: Console,
) -> int:
    pq.write_table(pa.Table.from_pylist(rows), out / f"{name}.parquet")
    provenance = {
        "mode": mode,
        "rounds": ROUNDS[mode],
        "num_threads": 1,
        "data": data.name if data else None,
    }
    write_result(out, name, figures.values, figures.intervals, provenance=provenance)
    console.print(figures.values)
    return 0
