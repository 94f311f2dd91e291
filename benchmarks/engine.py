"""Speed of the decoding engine beside Hugging Face `generate` and its peers, and where a step's time goes.

Parts (`benchmarks/speed/`): the demo task's rollout and what invariant numerics cost; plain decoding of model P
beside the peers that are built (`make bench-peers`), and shares of the memory's bandwidth; fixed speculation plans on
the demo pair for three drafts, and beside llama.cpp's; the shares of a decode step; memory, planned and measured, and
shared by long and short samples. All on one thread, with --full plain decoding on two; every ratio is taken side by
side.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from .peers.client import available_peers
from .speed.plain import greedy, plain_decoding
from .speed.rates import paging, rollout, speculation, speculation_beside_llama_cpp
from .speed.steps import draft_share, memory, prefill, step_breakdown, step_shares
from .support.harness import Bench
from .support.workload import default_cache_dir, demo_workload, model_p, real_workload

ROLLOUT_PROMPTS = 32
ROUNDS = {"quick": 1, "default": 2, "full": 5}
PLAIN_BATCH_SIZES = {"quick": (8,), "default": (1, 8), "full": (1, 8, 32)}
THREADS = {"quick": (1,), "default": (1,), "full": (1, 2)}
REAL_NEW_TOKENS = {"quick": 32, "default": 96, "full": 128}
REAL_BATCH_SIZES = {"quick": (8,), "default": (1, 8, 16), "full": (1, 4, 8, 16, 32)}
REAL_ROUNDS = {"quick": 1, "default": 2, "full": 4}


def run(bench: Bench, *, profile: bool = False) -> int:
    """Run the benchmark; with `profile` only the breakdown of a decode step; returns 0."""
    mode = bench.mode
    cache_dir, figures, rounds = default_cache_dir(), bench.figures, ROUNDS[mode]
    if bench.is_real:
        sizes = REAL_BATCH_SIZES[mode]
        workload = real_workload(
            max(sizes), data=bench.data, max_new_tokens=REAL_NEW_TOKENS[mode], console=bench.console
        )
        if workload is not None:
            workloads = {size: greedy(workload, size) for size in sizes}
            for threads in THREADS[mode]:
                bench.rows += plain_decoding(
                    workloads, figures, REAL_ROUNDS[mode], bench.console, threads=threads, suffix="_real"
                )
            bench.write(rounds=REAL_ROUNDS[mode])
        return 0
    if profile:
        rows = step_breakdown(bench.console)
        pq.write_table(pa.Table.from_pylist(rows), bench.out / "breakdown.parquet")
        return 0
    workload, is_full = demo_workload(ROLLOUT_PROMPTS), bench.is_full
    rollout(workload, figures, (4 if is_full else 1) * rounds)
    draft_share(workload, figures, rounds)
    workloads = {size: model_p(size) for size in PLAIN_BATCH_SIZES[mode]}
    for threads in THREADS[mode]:
        bench.rows += plain_decoding(workloads, figures, rounds, bench.console, threads=threads)
    sizes = {"batch_sizes": (8,)} if bench.is_quick else {}
    bench.rows += speculation(workload, figures, rounds, bench.console, **sizes, hugging_face=is_full)
    if "llama_cpp" in available_peers():
        beside = PLAIN_BATCH_SIZES[mode]
        bench.rows += speculation_beside_llama_cpp(workload, figures, rounds, bench.console, beside)
    bench.rows += step_shares(figures)
    prefill(figures, rounds)
    memory(cache_dir, figures)
    if is_full:
        paging(figures, rounds)
    bench.write(rounds=rounds, peers=available_peers(cache_dir / "peers"))
    return 0
