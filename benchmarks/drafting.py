"""Adaptive drafting: the goodput policy beside plain decoding, fixed plans, other policies, Hugging Face, the oracle.

Parts (`benchmarks/adaptive/`): the oracle on recorded states; constant batches; whole long-tailed rollouts of 64
samples with a good, a weak and a useless draft; a drafter that dies in the middle of a run. With --full a second pair,
`large`, whose target is twice as deep, and the demo run with and without refits.
"""

from __future__ import annotations

import statistics

from ..core.config import SpeculationConfig
from ..policies.drafting.look_up_or_draft import AdaptiveDrafting
from ..profiles.profile import Profile
from ..profiles.recording import DraftRecording
from .adaptive.policies import (
    FIXED,
    GOODPUT,
    MAIN_FIXED,
    OTHERS,
    PLAIN,
    WEAK_FIXED,
    best_of,
    constant_batch,
    pair_workload,
    plant_dead_drafter,
    profile_of,
    whole_rollout,
    with_other_draft,
)
from .adaptive.recorded import World, oracle_goodput, policy_goodput
from .support.harness import Bench
from .support.runs import PPO, train
from .support.timing import rate_rows, ratios
from .support.workload import DRAFT_LAYERS, Workload, real_workload

BATCH_SIZES = {"quick": (8,), "default": (1, 8, 64), "full": (1, 2, 4, 8, 16, 32, 64)}
ROUNDS = {"quick": 1, "default": 3, "full": 6}
PROFILE_S = {"quick": 12.0, "default": 45.0, "full": 90.0}
ORACLE_BATCHES = 240
ORACLE_STEPS = 600
REFIT_ITERATIONS = 15
REAL_NEW_TOKENS = {"quick": 32, "default": 96, "full": 128}
REAL_BATCH_SIZES = {"quick": (8,), "default": (1, 8, 16), "full": (1, 4, 8, 16)}
REAL_ROUNDS = {"quick": 1, "default": 2, "full": 4}
REAL_PROFILE_S = {"quick": 12.0, "default": 40.0, "full": 60.0}
REAL_POLICIES = {
    "plain": SpeculationConfig(policy="off"),
    "suffix_chain2": SpeculationConfig(policy="fixed", drafter="suffix", num_nodes=2),
    "suffix_bandit": SpeculationConfig(policy="bandit", drafter="suffix"),
    "layers_chain2": SpeculationConfig(policy="fixed", num_nodes=2),
    "goodput": SpeculationConfig(policy="goodput"),
}


def run(bench: Bench) -> int:
    """Run the benchmark, or on the real model; returns 0."""
    mode, data = bench.mode, bench.data
    if bench.is_real:
        return _real(bench)
    names = ("demo", "large") if mode == "full" else ("demo",)
    for name in (*names, "gsm8k") if data is not None else names:
        workload = pair_workload(name, data=data if name == "gsm8k" else None)
        made = profile_of(workload, budget_s=PROFILE_S[mode])
        _good_draft(bench, workload, made.profile, made.drafts)
        if name != "gsm8k":
            _other_drafts(bench, workload, made.profile)
        if name == "demo" and not bench.is_quick:
            dead = plant_dead_drafter(workload, made.profile)
            bench.figures.values["dead_drafter_suspended_after_steps"] = float(dead.suspended_after_steps)
            bench.figures.values["dead_drafter_cost_share"] = dead.cost_share
            bench.console.print(f"dead drafter: {dead}")
    if mode == "full":
        _refits(bench)
    bench.write(rounds=ROUNDS[mode])
    return 0


def _real(bench: Bench) -> int:
    """Every policy over plain decoding, without a trained draft: from the texts or from the target's own layers."""
    mode, sizes = bench.mode, REAL_BATCH_SIZES[bench.mode]
    workload = real_workload(
        2 * max(sizes) + 12,
        data=bench.data,
        max_new_tokens=REAL_NEW_TOKENS[mode],
        console=bench.console,
    )
    if workload is None:
        return 0
    bench.console.print(f"draft model: the first {DRAFT_LAYERS} layers of the target, untrained")
    profile = profile_of(workload, budget_s=REAL_PROFILE_S[mode]).profile
    for size in sizes:
        result = constant_batch(workload, REAL_POLICIES, profile, size, REAL_ROUNDS[mode])
        for name in REAL_POLICIES:
            if name != "plain":
                bench.figures.keep(f"{name}_over_plain_b{size}_real", ratios(result.rates, name, "plain"))
        bench.console.print(
            f"B={size}: { ({n: round(result.median(n), 1) for n in REAL_POLICIES}) } tokens/s"
        )
        bench.rows += rate_rows(result.rates, part="drafting", batch_size=size)
    bench.write(rounds=REAL_ROUNDS[mode])
    return 0


def _good_draft(bench: Bench, workload: Workload, profile: Profile, drafts: list[DraftRecording]) -> None:
    """The oracle, constant batches and a whole rollout with the pair's own draft."""
    name, mode, figures = workload.name, bench.mode, bench.figures
    rounds = ROUNDS[mode]
    fixed = FIXED if mode == "full" else MAIN_FIXED
    policies = PLAIN | fixed | GOODPUT | (OTHERS if mode == "full" else {})
    fractions, realised = {}, {}
    over_plain, over_fixed, shares = {}, {}, []
    for batch_size in BATCH_SIZES[mode]:
        result = constant_batch(workload, policies, profile, batch_size, rounds)
        bench.rows += rate_rows(result.rates, part="batch", batch_size=batch_size, pair=name, draft="good")
        best = result.best(list(fixed))
        over_plain[batch_size] = figures.keep(
            f"over_plain_b{batch_size}_{name}", ratios(result.rates, "goodput", "plain")
        )
        over_fixed[batch_size] = figures.keep(
            f"over_best_fixed_b{batch_size}_{name}", ratios(result.rates, "goodput", best)
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
        bench.console.print(
            f"{name}, B={batch_size}: over plain {line}; of the oracle {fractions[batch_size]:.3f}, "
            f"choosing {result.select_share:.3f}"
        )
    figures.values[f"oracle_fraction_{name}"] = statistics.fmean(fractions.values())
    figures.values[f"oracle_fraction_worst_batch_{name}"] = min(fractions.values())
    figures.values[f"oracle_realised_fraction_{name}"] = statistics.fmean(realised.values())
    figures.values[f"over_plain_worst_batch_{name}"] = min(over_plain.values())
    figures.values[f"over_best_fixed_worst_batch_{name}"] = min(over_fixed.values())

    taken, stats = whole_rollout(workload, policies, profile, rounds, hugging_face=True)
    best = best_of(taken, list(fixed))
    figures.keep(f"rollout_over_plain_{name}", ratios(taken, "goodput", "plain"))
    figures.keep(f"rollout_over_best_fixed_{name}", ratios(taken, "goodput", best))
    figures.keep(f"rollout_over_hf_{name}", ratios(taken, "goodput", "hf"))
    figures.values[f"selection_share_{name}"] = stats.select_s / stats.busy_s
    figures.values[f"selection_share_worst_batch_{name}"] = max(shares)
    _keep_rollout(bench, name, "good", taken, best)


def _other_drafts(bench: Bench, workload: Workload, profile: Profile) -> None:
    """Whole rollouts with a weak and with a useless draft."""
    name, mode, figures = workload.name, bench.mode, bench.figures
    for draft in ("useless",) if bench.is_quick else ("weak", "useless"):
        other, _ = with_other_draft(workload, profile, draft, budget_s=PROFILE_S[mode] / 4)
        policies = PLAIN | WEAK_FIXED | GOODPUT | (OTHERS if mode == "full" else {})
        taken, _ = whole_rollout(workload, policies, other, ROUNDS[mode], draft=draft)
        best = best_of(taken, list(WEAK_FIXED))
        figures.keep(f"rollout_{draft}_over_best_fixed_{name}", ratios(taken, "goodput", best))
        figures.keep(f"{draft}_over_plain_{name}", ratios(taken, "goodput", "plain"))
        _keep_rollout(bench, name, draft, taken, best)


def _refits(bench: Bench) -> None:
    """The demo run with refits and with a frozen draft."""
    values = bench.figures.values
    shape = ("speculation.policy=fixed", "speculation.num_nodes=6", f"run.iterations={REFIT_ITERATIONS}")
    for refit, suffix in ((True, ""), (False, "_frozen")):
        settings = (*shape, f"drafter_training.refit={str(refit).lower()}")
        metrics = train(PPO, bench.out, f"refit{suffix}", settings).metrics
        rates = [row["rollout/acceptance_rate"] for row in metrics]
        values[f"acceptance_last_over_first{suffix}_demo"] = rates[-1] / rates[0]
        if refit:
            shares = [row.get("time/refit_s", 0.0) / row["time/iteration_s"] for row in metrics]
            values["refit_largest_time_share_demo"] = max(shares)
        bench.console.print(f"refit {refit}: acceptance {rates[0]:.3f} to {rates[-1]:.3f}")


def _keep_rollout(bench: Bench, pair: str, draft: str, taken: dict[str, list[float]], best: str) -> None:
    bench.rows += rate_rows(taken, part="rollout", batch_size=64, pair=pair, draft=draft)
    line = {policy: round(statistics.median(ratios(taken, policy, "plain")), 2) for policy in taken}
    bench.console.print(f"{pair}, {draft} draft, rollout: over plain {line}; best fixed plan {best}")
