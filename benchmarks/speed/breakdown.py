"""`rlhfspec bench engine --profile`: the phases of a decode step, one row a plan."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.speed.shares import SHARE_BATCH_SIZE, STEPS, Stopwatch, share_engine
from benchmarks.speed.speculation import PLANS
from benchmarks.support.workload import model_p_requests
from rlhfspec.core.config import SpeculationConfig
from rlhfspec.engine.drafters.model_drafter import ModelDrafter

PHASES = ("draft", "select", "verify", "accept", "compact", "other")
SHOWN = {
    "plain": SpeculationConfig(policy="off"),
    "chain of 4": PLANS["chain n=4"],
    "tree of 8": PLANS["tree n=8 b=2"],
}


def step_breakdown(cache_dir: Path, console: Console) -> list[dict[str, float | str]]:
    """Print and return median milliseconds of each phase on model P with a draft of one layer, 16 samples."""
    table = Table(title=f"a decode step, ms in the median of {STEPS} ({SHARE_BATCH_SIZE} samples, model P)")
    for column in ("plan", *PHASES, "step"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    rows: list[dict[str, float | str]] = []
    for name, speculation in SHOWN.items():
        milliseconds = {phase: 1e3 * seconds for phase, seconds in _phases(cache_dir, speculation).items()}
        rows.append({"plan": name, **milliseconds})
        table.add_row(name, *(f"{milliseconds[column]:.2f}" for column in (*PHASES, "step")))
    console.print(table)
    return rows


def _phases(cache_dir: Path, speculation: SpeculationConfig) -> dict[str, float]:
    engine, compact = share_engine(cache_dir, speculation), Stopwatch()
    pools = [engine.runner.pool]
    if isinstance(engine.drafter, ModelDrafter):
        pools.append(engine.drafter.cache)
    for pool in pools:
        pool.make_dense = compact.around(pool.make_dense)
    for request in model_p_requests(SHARE_BATCH_SIZE, new_tokens=192):
        engine.submit(request)
    for _ in range(5):
        engine.step()
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
