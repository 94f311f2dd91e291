"""Instances of several ranks: the same bits as one rank's, samples that move between groups, and what a group costs.

Engines of 1, 2 and 4 ranks (processes) decode the same samples by several drafters; samples then move between the
three while they run; both are compared bitwise with one rank. Two ranks, a core each, are timed in turn with one.
Beside it: what a decode step says to the other ranks, counted. Returns 1 where a sample differs.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.table import Table

from benchmarks.support.harness import Bench
from benchmarks.support.rank_processes import RankProcesses, dealt
from benchmarks.support.reference import count_mismatches
from benchmarks.support.timing import engine_rate, interleaved, ratios
from benchmarks.support.workload import Workload, demo_workload, model_p, real_workload
from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.records import Completion, SampleKey, SampleRequest
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.group.ranks import GroupRanks

PLANS = {
    "plain": SpeculationConfig(policy="off"),
    "look-ups": SpeculationConfig(drafter="suffix", policy="fixed", num_nodes=6, depth=4, branching=2),
    "chain": SpeculationConfig(policy="fixed", num_nodes=4),
    "tree": SpeculationConfig(policy="fixed", num_nodes=8, depth=4, branching=2),
}
SAMPLINGS = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0})
PROMPTS = {"quick": 6, "default": 40, "full": 160}
MOVES = {"quick": 40, "default": 200, "full": 1000}
ROUNDS = {"quick": 2, "default": 5, "full": 12}
SLOTS = 8


def run(bench: Bench) -> int:
    """Measure; returns 1 where a sample differs."""
    count = PROMPTS[bench.mode]
    if bench.is_real:
        real = real_workload(SLOTS, data=bench.data, max_new_tokens=24, console=bench.console)
        if real is None:
            return 0
        exact, timed = [(real, (1, 2))], real
    else:
        exact, timed = (
            [(demo_workload(count), (1, 2)), (model_p(count, new_tokens=40), (1, 2, 4))],
            model_p(SLOTS),
        )
    differing = 0
    for workload, sizes in exact:
        differing += _compare(bench, workload, sizes)
        differing += _move(bench, workload, sizes)
    _time(bench, timed)
    bench.figures.values["differing"] = differing
    bench.write(rounds=ROUNDS[bench.mode])
    return int(differing > 0)


@contextmanager
def groups(sizes: Sequence[int]) -> Iterator[Mapping[int, GroupRanks | None]]:
    """Ranks of every size; this process leads them all."""
    with ExitStack() as open_until_here:
        folder = Path(open_until_here.enter_context(tempfile.TemporaryDirectory()))
        processes = {size: RankProcesses(folder, size) for size in sizes if size > 1}
        for each in processes.values():
            open_until_here.callback(each.kill)
            open_until_here.callback(each.stop)
        yield {size: processes[size].ranks if size > 1 else None for size in sizes}


def engine_of(workload: Workload, plan: str, ranks: GroupRanks | None) -> Engine:
    """An engine over a group; what drafts is whole on its leader."""
    speculation = PLANS[plan]
    draft = workload.draft("float32") if speculation.has_draft else None
    return build_engine(
        dealt(workload.target("float32"), ranks, workload.vocab_size),
        draft,
        engine=EngineConfig(numerics="invariant", max_running_samples=SLOTS),
        speculation=speculation,
        max_total_tokens=workload.max_total_tokens,
        vocab_size=workload.vocab_size,
    )


def _requests(workload: Workload) -> list[SampleRequest]:
    return [
        request
        for number, sampling in enumerate(SAMPLINGS)
        for request in workload.requests(1000 * number, **sampling)
    ]


def _compare(bench: Bench, workload: Workload, sizes: Sequence[int]) -> int:
    """Samples of every size and plan that differ from plain decoding on one rank."""
    requests = _requests(workload)
    expected = _by_key(engine_of(workload, "plain", None).generate(requests))
    table = Table("pair", "ranks", "plan", "samples", "differ", "orders, sums, exchanges a step")
    total, samples = 0, 0
    with groups(sizes) as ranks:
        for size, mine in ranks.items():
            for plan in PLANS:
                engine = engine_of(workload, plan, mine)
                before = _said(mine)
                differ = count_mismatches(_by_key(engine.generate(requests)), expected)
                steps = engine.stats.num_decode_steps
                said = [round((b - a) / steps, 2) for a, b in zip(before, _said(mine), strict=True)]
                table.add_row(workload.name, str(size), plan, str(len(requests)), str(differ), str(said))
                bench.rows.append(
                    {
                        "pair": workload.name,
                        "ranks": size,
                        "plan": plan,
                        "samples": len(requests),
                        "differ": differ,
                    }
                )
                total, samples = total + differ, samples + len(requests)
    bench.console.print(table)
    bench.figures.values[f"{workload.name}_samples"] = samples
    return total


def _said(ranks: GroupRanks | None) -> tuple[int, int, int]:
    return (0, 0, 0) if ranks is None else (ranks.num_orders, ranks.num_sums, ranks.num_exchanges)


def _move(bench: Bench, workload: Workload, sizes: Sequence[int]) -> int:
    """Samples that differ when they move between groups of other sizes while they run, caches included."""
    choose, wanted, done, moves = random.Random(5), MOVES[bench.mode], dict[SampleKey, Completion](), 0
    requests = _requests(workload)
    expected = _by_key(engine_of(workload, "plain", None).generate(requests))
    with groups(sizes) as ranks:
        engines = [
            engine_of(workload, "tree" if workload.name == "demo" else "look-ups", of)
            for of in ranks.values()
        ]
        waiting = list(requests)
        while waiting or any(engine.has_work for engine in engines):
            for engine in engines:
                while waiting and engine.num_running + engine.num_waiting < SLOTS - 2:
                    engine.submit(waiting.pop())
                done |= _by_key(engine.step())
            if moves < wanted:
                moves += _moved(choose, engines)
    bench.figures.values[f"{workload.name}_moves"] = moves
    differ = count_mismatches(done, expected) + len(requests) - len(done)
    bench.console.print(
        f"{workload.name}: {moves} moves between groups of {list(sizes)} ranks, {differ} differ"
    )
    return differ


def _moved(choose: random.Random, engines: Sequence[Engine]) -> int:
    """Move a running sample to another engine; 0 where none runs or there is no room."""
    source, to = choose.sample(list(engines), 2)
    running = list(source.progress())
    if not running or to.num_running >= SLOTS:
        return 0
    nothing = dict.fromkeys(source.exchange.token_bytes, 0)
    left = source.exchange.detach(choose.choice(running), weight_version=0, shipped=nothing)
    if left is None:
        return 0
    to.exchange.attach(*left)
    return 1


def _time(bench: Bench, workload: Workload) -> None:
    """Two ranks in turn with one, at batch 8."""
    with groups((1, 2)) as ranks:
        requests = workload.requests()
        rates = {
            f"{size} rank(s)": engine_rate(engine_of(workload, "plain", of), requests)
            for size, of in ranks.items()
        }
        taken = interleaved(rates, ROUNDS[bench.mode])
    ratio = bench.figures.keep(f"{workload.name}_two_over_one", ratios(taken, "2 rank(s)", "1 rank(s)"))
    low, high = bench.figures.intervals[f"{workload.name}_two_over_one"]
    bench.console.print(
        f"{workload.name}: two ranks over one {ratio:.2f} [{low:.2f}, {high:.2f}] at batch {SLOTS}"
    )


def _by_key(completions: Sequence[Completion]) -> dict[SampleKey, Completion]:
    return {completion.key: completion for completion in completions}
