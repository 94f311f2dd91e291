"""Adaptive drafting: the goodput policy beside plain decoding, fixed plans, other policies, Hugging Face, the oracle.

Parts (`benchmarks/adaptive/`): the oracle on recorded states; constant batches; whole long-tailed rollouts of 64
samples with a good, a weak and a useless draft; a drafter that dies in the middle of a run; with --full the demo
run with and without refits. Two pairs: `demo`, and `large`, whose target is twice as deep.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.adaptive.batches import FIXED, GOODPUT, MAIN_FIXED, OTHERS, PLAIN, WEAK_FIXED, constant_batch
from benchmarks.adaptive.dead_drafter import plant_dead_drafter
from benchmarks.adaptive.pairs import pair_workload, profile_of, with_other_draft
from benchmarks.adaptive.recorded import World, oracle_goodput, policy_goodput
from benchmarks.adaptive.refits import acceptance_by_iteration
from benchmarks.adaptive.rollouts import best_of, whole_rollout
from benchmarks.real.speed import run_drafting
from benchmarks.support.result import write_result
from benchmarks.support.timing import Figures, ratios
from benchmarks.support.workload import Workload
from rlhfspec.cluster.observe.console import PipeConsole
from rlhfspec.policies.drafting.adaptive import AdaptiveDrafting
from rlhfspec.profiles.profile import Profile
from rlhfspec.profiles.recording import DraftRecording

BATCH_SIZES = {"quick": (8,), "default": (1, 4, 16, 64), "full": (1, 2, 4, 8, 16, 32, 64)}
ROUNDS = {"quick": 1, "default": 4, "full": 6}
LARGE_BATCH_SIZES = {"default": (4, 64), "full": BATCH_SIZES["full"]}
PROFILE_S = {"quick": 12.0, "default": 45.0, "full": 90.0}
ORACLE_BATCHES = 240
ORACLE_STEPS = 600
REFIT_ITERATIONS = 15


def run(*, out: Path, mode: str, data: Path | None, real: bool = False) -> int:
    """Run the benchmark, with `real` on the real model; returns 0."""
    torch.set_num_threads(1)
    console, figures = PipeConsole(), Figures()
    if real:
        return run_drafting(out=out, mode=mode, data=data, console=console)
    rows: list[dict[str, Any]] = []
    names = ("demo",) if mode == "quick" else ("demo", "large")
    for name in (*names, "gsm8k") if data is not None else names:
        workload = pair_workload(name, data=data if name == "gsm8k" else None)
        made = profile_of(workload, budget_s=PROFILE_S[mode])
        rows += _good_draft(workload, made.profile, made.drafts, figures, console, mode)
        if (name == "demo" and mode != "quick") or (mode == "full" and name == "large"):
            rows += _other_drafts(workload, made.profile, figures, console, mode)
        if mode != "quick" and name == "demo":
            dead = plant_dead_drafter(workload, made.profile)
            figures.values["dead_drafter_suspended_after_steps"] = float(dead.suspended_after_steps)
            figures.values["dead_drafter_cost_share"] = dead.cost_share
            console.print(f"dead drafter: {dead}")
    if mode == "full":
        _refits(out, figures, console)
    pq.write_table(pa.Table.from_pylist(rows), out / "drafting.parquet")
    provenance = {
        "mode": mode,
        "rounds": ROUNDS[mode],
        "num_threads": 1,
        "data": data.name if data else None,
    }
    write_result(out, "drafting", figures.values, figures.intervals, provenance=provenance)
    console.print(figures.values)
    return 0


def _good_draft(
    workload: Workload,
    profile: Profile,
    drafts: list[DraftRecording],
    figures: Figures,
    console: PipeConsole,
    mode: str,
) -> list[dict[str, Any]]:
    """The oracle, constant batches and a whole rollout with the pair's own draft."""
    name, rounds = workload.name, ROUNDS[mode]
    fixed = FIXED if mode == "full" else MAIN_FIXED
    policies = PLAIN | fixed | GOODPUT | (OTHERS if mode == "full" else {})
    rows: list[dict[str, Any]] = []
    fractions, realised = {}, {}
    over_plain, over_fixed, shares = {}, {}, []
    for batch_size in (LARGE_BATCH_SIZES if name == "large" else BATCH_SIZES)[mode]:
        result = constant_batch(workload, policies, profile, batch_size, rounds)
        rows += result.rows(pair=name, draft="good")
        best = result.best(list(fixed))
        over_plain[batch_size] = figures.keep(
            f"over_plain_b{batch_size}_{name}", result.ratios("goodput", "plain")
        )
        over_fixed[batch_size] = figures.keep(
            f"over_best_fixed_b{batch_size}_{name}", result.ratios("goodput", best)
        )
        shares.append(result.select_share)
        world = World(drafts, profile.acceptance, profile.cost, seed=1)
        oracle = oracle_goodput(world, batch_size, ORACLE_BATCHES)
        policy = AdaptiveDrafting(profile, max_nodes=16, max_depth=16)
        again = World(drafts, profile.acceptance, profile.cost, seed=2)
        # choosing takes time, and the oracle's does not: it is charged as measured
        ours = policy_goodput(policy, again, batch_size, ORACLE_STEPS, result.select_s)
        fractions[batch_size], realised[batch_size] = ours / oracle.by_state, ours / oracle.realised
        line = {policy: round(result.median(policy) / result.median("plain"), 2) for policy in result.rates}
        console.print(
            f"{name}, B={batch_size}: over plain {line}; of the oracle {fractions[batch_size]:.3f}, "
            f"choosing {result.select_share:.3f}"
        )
    figures.values[f"oracle_fraction_{name}"] = statistics.fmean(fractions.values())
    figures.values[f"oracle_fraction_worst_batch_{name}"] = min(fractions.values())
    figures.values[f"oracle_realised_fraction_{name}"] = statistics.fmean(realised.values())
    figures.values[f"over_plain_worst_batch_{name}"] = min(over_plain.values())
    figures.values[f"over_best_fixed_worst_batch_{name}"] = min(over_fixed.values())

    if mode == "quick":
        return rows
    taken, stats = whole_rollout(workload, policies, profile, rounds, hugging_face=True)
    best = best_of(taken, list(fixed))
    figures.keep(f"rollout_over_plain_{name}", ratios(taken, "goodput", "plain"))
    figures.keep(f"rollout_over_best_fixed_{name}", ratios(taken, "goodput", best))
    figures.keep(f"rollout_over_hf_{name}", ratios(taken, "goodput", "hf"))
    figures.values[f"selection_share_{name}"] = stats.select_s / stats.busy_s
    figures.values[f"selection_share_worst_batch_{name}"] = max(shares)
    rows += _rollout_rows(taken, name, "good")
    _say_rollout(console, name, "good", taken, best)
    return rows


def _other_drafts(
    workload: Workload, profile: Profile, figures: Figures, console: PipeConsole, mode: str
) -> list[dict[str, Any]]:
    """Whole rollouts with a weak and with a useless draft."""
    name, rows = workload.name, []
    for draft in ("weak", "useless"):
        other, _ = with_other_draft(workload, profile, draft, budget_s=PROFILE_S[mode] / 4)
        policies = PLAIN | WEAK_FIXED | GOODPUT | (OTHERS if mode == "full" else {})
        taken, _ = whole_rollout(workload, policies, other, ROUNDS[mode], draft=draft)
        best = best_of(taken, list(WEAK_FIXED))
        figures.keep(f"rollout_{draft}_over_best_fixed_{name}", ratios(taken, "goodput", best))
        figures.keep(f"{draft}_over_plain_{name}", ratios(taken, "goodput", "plain"))
        rows += _rollout_rows(taken, name, draft)
        _say_rollout(console, name, draft, taken, best)
    return rows


def _refits(out: Path, figures: Figures, console: PipeConsole) -> None:
    """The demo run with refits and with a frozen draft."""
    for refit, suffix in ((True, ""), (False, "_frozen")):
        rates, share, checksum = acceptance_by_iteration(out, refit=refit, iterations=REFIT_ITERATIONS)
        figures.values[f"acceptance_last_over_first{suffix}_demo"] = rates[-1] / rates[0]
        if refit:
            figures.values["refit_largest_time_share_demo"] = share
        console.print(f"refit {refit}: acceptance {rates[0]:.3f} to {rates[-1]:.3f}, checksum {checksum}")


def _rollout_rows(taken: dict[str, list[float]], pair: str, draft: str) -> list[dict[str, Any]]:
    return [
        {
            "part": "rollout",
            "batch_size": 64,
            "policy": name,
            "tokens_per_s": value,
            "pair": pair,
            "draft": draft,
        }
        for name, values in taken.items()
        for value in values
    ]


def _say_rollout(
    console: PipeConsole, name: str, draft: str, taken: dict[str, list[float]], best: str
) -> None:
    line = {policy: round(statistics.median(ratios(taken, policy, "plain")), 2) for policy in taken}
    console.print(f"{name}, {draft} draft, rollout: over plain {line}; best fixed plan {best}")
