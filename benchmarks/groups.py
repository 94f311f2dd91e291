"""Instances of several ranks: what a group costs and what its ranks say to each other, beside one rank.

Two ranks, a core each, are timed in turn with one, and with what the cluster simulator's formula makes of one rank's
seconds and of a sum's. `rlhfspec bench exactness` compares their bits.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.moving.between_groups import groups
from benchmarks.support.harness import Bench
from benchmarks.support.timing import engine_rate, interleaved, ratios
from benchmarks.support.workload import PLAIN, Workload, model_p, real_workload
from rlhfspec.engine.group.ranks import GroupRanks
from rlhfspec.policies.simulate.model_dimensions import dimensions_of
from rlhfspec.policies.simulate.roofline import DeviceSheet, Reached, Roofline

ROUNDS = {"quick": 2, "default": 5, "full": 12}
SLOTS = 8


def run(bench: Bench) -> int:
    """Measure; returns 0."""
    workload = (
        real_workload(SLOTS, data=bench.data, max_new_tokens=24, console=bench.console)
        if bench.is_real
        else model_p(SLOTS)
    )
    if workload is None:
        return 0
    with groups((1, 2)) as ranks:
        _count(bench, workload, ranks[2])
        requests = workload.requests()
        rates = {
            f"{size} rank(s)": engine_rate(
                workload.engine(PLAIN, ranks=of, max_running_samples=SLOTS), requests
            )
            for size, of in ranks.items()
        }
        taken = interleaved(rates, ROUNDS[bench.mode])
    name = f"{workload.name}_two_over_one"
    ratio = bench.figures.keep(name, ratios(taken, "2 rank(s)", "1 rank(s)"))
    low, high = bench.figures.intervals[name]
    bench.console.print(
        f"{workload.name}: two ranks over one {ratio:.2f} [{low:.2f}, {high:.2f}] at batch {SLOTS}"
    )
    bench.figures.values[f"{name}_simulated"] = _simulated(bench, workload, taken)
    bench.write(rounds=ROUNDS[bench.mode])
    return 0


def _count(bench: Bench, workload: Workload, ranks: GroupRanks | None) -> None:
    """Orders, sums and exchanges of a decode step of two ranks, prefills shared out among the steps."""
    assert ranks is not None
    engine = workload.engine(PLAIN, ranks=ranks, max_running_samples=SLOTS)
    before = {name: getattr(ranks, name) for name in _COUNTED}
    engine.generate(workload.requests())
    for name in _COUNTED:
        said = getattr(ranks, name) - before[name]
        bench.figures.values[f"{workload.name}_{name}_a_step"] = said / engine.stats.num_decode_steps


_COUNTED = ("num_orders", "num_sums", "num_exchanges")
