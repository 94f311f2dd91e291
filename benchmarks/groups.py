"""Instances of several ranks: what a group costs and what its ranks say to each other, beside one rank.

Two ranks, a core each, are timed in turn with one, decoding and loading a weight version, and with what the cluster
simulator's formula makes of one rank's seconds and of a sum's. `rlhfspec bench exactness` compares their bits.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from ..engine.engine import Engine
from ..engine.group.ranks import GroupRanks
from ..engine.weights.chunks import unique_tensors
from ..policies.simulate.model_dimensions import dimensions_of
from ..policies.simulate.roofline import Reached, Roofline
from ..profiles.gpu_sheets import GPUSheet
from .moving.between_groups import groups
from .support.harness import Bench
from .support.timing import Rate, engine_rate, interleaved, ratios
from .support.workload import PLAIN, Workload, model_p, real_workload

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
        sum_s = _count(bench, workload, ranks[2])
        requests, tensors = workload.requests(), dict(unique_tensors(workload.target("float32")))
        engines = {
            f"{size} rank(s)": workload.engine(PLAIN, ranks=of, max_running_samples=SLOTS)
            for size, of in ranks.items()
        }
        rates = {name: engine_rate(engine, requests) for name, engine in engines.items()}
        taken = interleaved(rates, ROUNDS[bench.mode])
        loads = {name: _load_rate(engine, tensors) for name, engine in engines.items()}
        loaded = interleaved(loads, ROUNDS[bench.mode])
    bench.figures.keep(f"{workload.name}_loads_two_over_one", ratios(loaded, "2 rank(s)", "1 rank(s)"))
    bench.figures.keep(f"{workload.name}_load_s_of_two", [1.0 / rate for rate in loaded["2 rank(s)"]])
    name = f"{workload.name}_two_over_one"
    ratio = bench.figures.keep(name, ratios(taken, "2 rank(s)", "1 rank(s)"))
    low, high = bench.figures.intervals[name]
    bench.console.print(
        f"{workload.name}: two ranks over one {ratio:.2f} [{low:.2f}, {high:.2f}] at batch {SLOTS}"
    )
    step_s = SLOTS / statistics.median(taken["1 rank(s)"])
    bench.figures.values[f"{name}_simulated"] = step_s / simulated_step_s(workload, step_s, sum_s, ranks=2)
    bench.write(rounds=ROUNDS[bench.mode])
    return 0


def _load_rate(engine: Engine, tensors: Mapping[str, Tensor]) -> Rate:
    """Load a weight version, laid out and read back on every rank; versions per second."""

    def rate() -> float:
        began_s = time.perf_counter()
        engine.runner.load_parts(tensors, [tensors])
        return 1.0 / (time.perf_counter() - began_s)

    return rate


def _count(bench: Bench, workload: Workload, ranks: GroupRanks | None) -> float:
    """Orders, sums and exchanges of a decode step of two ranks, prefills shared out among the steps.

    Returns seconds of a sum at which the leader came last: of the fastest tenth.
    """
    assert ranks is not None
    engine = workload.engine(PLAIN, ranks=ranks, max_running_samples=SLOTS)
    before = {name: getattr(ranks, name) for name in _COUNTED}
    usual, seconds = ranks.add_up, list[float]()

    def timed(x: Any, part: Any) -> None:
        began_s = time.perf_counter()
        usual(x, part)
        seconds.append(time.perf_counter() - began_s)

    ranks.add_up = timed
    engine.generate(workload.requests())
    ranks.add_up = usual
    for name in _COUNTED:
        said = getattr(ranks, name) - before[name]
        bench.figures.values[f"{workload.name}_{name}_a_step"] = said / engine.stats.num_decode_steps
    return float(np.quantile(seconds, 0.1))


def simulated_step_s(workload: Workload, step_s: float, sum_s: float, *, ranks: int) -> float:
    """Seconds of a decode step of so many ranks by the simulator's formula, which is given those of one rank's step."""
    text = (workload.paths.target / "config.json").read_text()
    dimensions = dimensions_of(json.loads(text), origin=str(workload.paths.target))
    context_tokens = SLOTS * (workload.max_total_tokens - workload.sampling.max_new_tokens / 2)

    def forward_s(gpus: int, bytes_per_s: float) -> float:
        sheet = GPUSheet(
            name="a core",
            bf16_flops=math.inf,
            memory_bytes=math.inf,
            memory_bytes_per_s=bytes_per_s,
            link_bytes_per_s=math.inf,
            domain_gpus=ranks,
            network_bytes_per_s=math.inf,
            source="measured",
        )
        reached = Reached(memory=1.0, compute=1.0, link=1.0, layer_s=0.0, collective_s=sum_s)
        instance = Roofline(
            model=dimensions, sheet=sheet, gpus=gpus, precision="bf16", cache_bytes=2.0, reached=reached
        )
        return instance.forward_s(SLOTS, 1.0, context_tokens)

    return forward_s(ranks, forward_s(1, 1.0) / step_s)


_COUNTED = ("num_orders", "num_sums", "num_exchanges")
