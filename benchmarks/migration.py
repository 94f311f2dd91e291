"""Live migration: that it changes no bit, what it costs, and whether the gate chooses the cheaper way.

Parts (`benchmarks/moving/`): forced random moves over Gloo and over the object store; downtime, bytes by stage and
slower steps on a target of 29M parameters; with --full the grid of contexts, cold and warm pairs and bandwidths on
which the gate must choose between shipping caches and computing them anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from .moving.downtime import Moved, move_while_decoding
from .moving.exact import MoveTally, forced_moves
from .moving.gate_grid import Cell, measure_grid
from .support.actor_pool import bench_ray
from .support.harness import Bench
from .support.timing import Figures
from .support.workload import demo_workload, gsm8k_workload

MIGRATIONS = {"quick": 60, "default": 1000, "full": 4000}
OVER_OBJECT_STORE = {"quick": 0, "default": 100, "full": 1000}
ROLLOUTS = {"quick": 1, "default": 20, "full": 40}
GATE_REPEATS = 5


def run(bench: Bench) -> int:
    """Run the benchmark; returns 0, or 1 when a bit changed or a sample was lost."""
    with bench_ray("bench-migration"):
        runs = _exact(bench)
        _costs(bench)
        if bench.is_full:
            bench.write()
            bench.rows += [asdict(cell) for cell in _gate(bench)]
    bench.console.print(f"written {bench.write()}")
    return 1 if any(run.differing_samples or run.missing_samples or run.alarms for run in runs) else 0


def _exact(bench: Bench) -> list[MoveTally]:
    mode, data, workload = bench.mode, bench.data, demo_workload(40)
    runs = [forced_moves(workload, at_least=MIGRATIONS[mode], transport="auto")]
    if OVER_OBJECT_STORE[mode]:
        runs.append(forced_moves(workload, at_least=OVER_OBJECT_STORE[mode], transport="object_store"))
    if data is not None:
        runs.append(forced_moves(gsm8k_workload(data, 40), at_least=MIGRATIONS[mode] // 10, transport="auto"))
    for forced in runs:
        bench.console.print(f"forced moves: {forced}")
    named = {"mismatches": "differing_samples", "missing": "missing_samples"}
    for name in ("migrations", "recomputations", "kept", "samples", "mismatches", "alarms", "missing"):
        bench.figures.values[name] = float(sum(getattr(forced, named.get(name, name)) for forced in runs))
    most = max(forced.most_moves_of_a_sample for forced in runs)
    bench.figures.values["most_moves_of_a_sample"] = float(most)
    return runs


def _costs(bench: Bench) -> None:
    figures = bench.figures
    for suffix, plain in (("", False), ("_plain", True)):
        if plain and bench.is_quick:
            continue
        moved = move_while_decoding(rollouts=ROLLOUTS[bench.mode] // (2 if plain else 1), plain=plain)
        _keep_costs(moved, suffix, figures)
        bench.console.print(
            {name: value for name, value in figures.values.items() if name.endswith(suffix or "")}
            if suffix
            else figures.values
        )


def _keep_costs(moved: Moved, suffix: str, figures: Figures) -> None:
    figures.keep(f"downtime_decode_steps_median{suffix}", moved.downtime_steps)
    figures.values[f"downtime_decode_steps_p95{suffix}"] = _percentile(moved.downtime_steps, 95)
    figures.keep(f"downtime_s_median{suffix}", moved.downtime_s)
    shipped, handed_over = sum(moved.stage1_bytes), sum(moved.stage2_bytes)
    figures.values[f"stage1_bytes_share{suffix}"] = shipped / (shipped + handed_over)
    figures.values[f"stage1_s_median{suffix}"] = _percentile(moved.stage1_s, 50)
    figures.values[f"attach_s_median{suffix}"] = _percentile(moved.attach_s, 50)
    figures.values[f"context_tokens_median{suffix}"] = _percentile(moved.context_tokens, 50)
    figures.values[f"costed_migrations{suffix}"] = float(len(moved.downtime_s))
    figures.values[f"bystander_slowdown{suffix}"] = moved.slowdown
    figures.values[f"bystander_slowdown_mean{suffix}"] = moved.mean_slowdown
    figures.values[f"bystander_steps{suffix}"] = float(len(moved.step_pairs))
    figures.intervals[f"bystander_slowdown{suffix}"] = _slowdown_interval(moved.step_pairs)
    figures.values["mismatches"] += moved.mismatches


def _gate(bench: Bench) -> list[Cell]:
    figures, cells = bench.figures, measure_grid(repeats=GATE_REPEATS)
    for cell in cells:
        bench.console.print(cell)
    for name in ("migrate", "recompute"):
        figures.values[f"{name}_is_best_share"] = _share([cell.best == name for cell in cells])
        always = [_with_choice(cell, name).is_right for cell in cells]
        figures.values[f"always_{name}_correct_share"] = _share(always)
    figures.values["gate_correct_share"] = _share([cell.is_right for cell in cells])
    return cells


def _with_choice(cell: Cell, chosen: str) -> Cell:
    return replace(cell, chosen=chosen)


def _slowdown_interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Bootstrap 95% interval of the median ratio, minus 1."""
    overlapped, alone = np.asarray(pairs).T
    ratios, random = overlapped / alone, np.random.default_rng(0)
    medians = np.median(ratios[random.integers(len(ratios), size=(2000, len(ratios)))], axis=1) - 1.0
    return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values)


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))
