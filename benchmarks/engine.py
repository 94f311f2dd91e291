"""Speed of the decoding engine beside Hugging Face `generate` and its peers, and where a step's time goes.

Parts (`benchmarks/speed/`): the demo task's rollout and what invariant numerics cost; plain decoding of model P
beside the peers that are built (`make bench-peers`); fixed speculation plans on the demo pair for three drafts; the
shares of a decode step; memory, planned and measured, and shared by long and short samples. All on one thread; every
ratio is taken side by side.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.peers.client import available_peers
from benchmarks.real.speed import run_engine
from benchmarks.speed.breakdown import step_breakdown
from benchmarks.speed.memory import memory
from benchmarks.speed.paging import paging
from benchmarks.speed.plain import plain_decoding
from benchmarks.speed.rollout import rollout
from benchmarks.speed.shares import draft_share, prefill, step_shares
from benchmarks.speed.speculation import speculation
from benchmarks.support.result import write_result
from benchmarks.support.timing import Figures
from benchmarks.support.workload import default_cache_dir, demo_workload
from rlhfspec.cluster.observe.console import PipeConsole

ROLLOUT_PROMPTS = 32
ROUNDS = {"quick": 1, "default": 2, "full": 5}


def run(*, out: Path, mode: str, data: Path | None, profile: bool = False, real: bool = False) -> int:
    """Run the benchmark; with `profile` only the breakdown of a decode step, with `real` the real model; returns 0."""
    torch.set_num_threads(1)
    console, figures, cache_dir = PipeConsole(), Figures(), default_cache_dir()
    if real:
        return run_engine(out=out, mode=mode, data=data, console=console)
    if profile:
        pq.write_table(pa.Table.from_pylist(step_breakdown(cache_dir, console)), out / "breakdown.parquet")
        return 0
    workload, rounds = demo_workload(ROLLOUT_PROMPTS), ROUNDS[mode]
    quick = mode == "quick"
    rollout(workload, figures, 8 * rounds)
    draft_share(workload, figures, rounds)
    rows = plain_decoding(cache_dir, figures, rounds, console, **({"batch_sizes": (8,)} if quick else {}))
    rows += speculation(workload, figures, rounds, console, **({"batch_sizes": (8,)} if quick else {}))
    rows += step_shares(cache_dir, figures)
    prefill(cache_dir, figures, rounds)
    memory(cache_dir, figures)
    if not quick:
        paging(cache_dir, figures, rounds)
    pq.write_table(pa.Table.from_pylist(rows), out / "engine.parquet")
    provenance = {
        "mode": mode,
        "rounds": rounds,
        "num_threads": 1,
        "peers": available_peers(cache_dir / "peers"),
    }
    write_result(out, "engine", figures.values, figures.intervals, provenance=provenance)
    console.print(figures.values)
    return 0
