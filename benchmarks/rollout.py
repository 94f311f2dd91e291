"""Whole rollouts on two instances: static, pull, recompute only, the paper's rule, ours; against the simulator.

Lengths, log-normal: skewed (the longest half on one instance) with capped slots and a queue and with everything
resident, at random, balanced. Rates are measured with both instances busy, and with one; `perfect` is the simulator's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..cluster.observe.console import PipeConsole
from ..core.config import EngineConfig, ReallocationConfig, SpeculationConfig
from ..engine.cache.kv_pool import KVShape
from ..engine.weights.loading import load_causal_lm
from ..policies.migration.move_messages import MoveOutcome
from ..policies.reallocation.pool_records import ReallocationPolicy
from ..policies.simulate.compare import perfect_finish_s
from ..policies.simulate.simulated_pool import simulate
from ..policies.simulate.simulation_records import (
    MoveTruth,
    PoolSetup,
    Samples,
    WorkloadName,
    drawn_lengths,
    samples_of,
)
from ..profiles.profile import Profile
from .adaptive.policies import pair_workload, profile_of
from .moving.rates import Rates, measured_rates
from .moving.rollouts import (
    OURS,
    PAPER,
    PULL,
    RECOMPUTE,
    STATIC,
    Way,
    overhead_shares,
    plan_seconds,
    policy_of,
    reallocate_seconds,
    requests_of,
)
from .support.actor_pool import ActorPool, RolloutOutcome, bench_ray
from .support.harness import Bench
from .support.timing import Figures
from .support.workload import Workload, real_workload

INSTANCES = 2
REAL_SAMPLES = {"quick": 16, "default": 48, "full": 64}
REAL_MAX_TOKENS = {"quick": 64, "default": 192, "full": 256}
REAL_ROUNDS = {"quick": 1, "default": 3, "full": 5}
WAYS = (STATIC, PULL, OURS)
EARLIER_SEED = 900


def _real(bench: Bench) -> int:
    """Write OUT/rollout_real.json: how many times as fast ours is, on skewed lengths; returns 0."""
    mode, console, figures = bench.mode, bench.console, bench.figures
    samples, most = REAL_SAMPLES[mode], REAL_MAX_TOKENS[mode]
    workload = real_workload(samples, data=bench.data, max_new_tokens=most, console=console)
    if workload is None:
        return 0
    lengths = drawn_lengths("skewed", samples, INSTANCES, max_new_tokens=most, seed=0)
    earlier = drawn_lengths("long_tail", samples, INSTANCES, max_new_tokens=most, seed=EARLIER_SEED)
    kv_bytes = float(KVShape.of(workload.target("float32").config).token_bytes)
    seconds: dict[str, list[float]] = {way.name: [] for way in WAYS}
    moved: list[int] = []
    with (
        bench_ray("bench-rollout-real"),
        ActorPool(
            workload,
            engine=EngineConfig(max_running_samples=samples, probe=False),
            speculation=SpeculationConfig(policy="off"),
            migration=ReallocationConfig(),
        ) as pool,
    ):
        curve = measured_rates(pool, workload, earlier[::INSTANCES], 1).curve
        for number in range(REAL_ROUNDS[mode]):
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                outcome = pool.rollout(
                    requests_of(workload, lengths),
                    reallocation=policy_of(way, curve, kv_bytes, earlier.tolist()),
                    binding=way.binding,
                )
                seconds[way.name].append(outcome.seconds)
                if way is OURS:
                    moved.append(sum(move.outcome == MoveOutcome.MOVED for move in outcome.moves))
            console.print({name: round(values[-1], 2) for name, values in seconds.items()})
    for other in (STATIC, PULL):
        pairs = zip(seconds[other.name], seconds[OURS.name], strict=True)
        figures.keep(f"skewed_over_{other.name}_real", [slow / fast for slow, fast in pairs])
    figures.values["moves_per_rollout_real"] = statistics.fmean(moved)
    bench.write(samples=samples)
    return 0


INSTANCES = 2
SAMPLES = 256
"Above the knee: below some 16 samples an instance is no faster for having fewer, and there is nothing to gain."
CAPPED_SLOTS = 16
MAX_TOKENS = 900
"A rollout takes ten to twenty seconds: much longer than a look at the pool and the moves it leads to."
PROFILE_S = {"quick": 8.0, "default": 25.0, "full": 60.0}
ROUNDS = {"quick": 1, "default": 3, "full": 6}
MORE_ROUNDS = 3
"Times as many where ways differ by a hundredth or two: balanced lengths, capped slots. Rollouts vary by a tenth."
SEEDS = {"quick": 1, "default": 10, "full": 20}
TAIL_ROUNDS = {"quick": 1, "default": 2, "full": 3}
"Of each seed: what moving gains there is as little as rollouts of one kind differ."
EARLIER_SEED = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The lengths of samples in order of arrival, and the slots of an instance."""

    name: str
    lengths: np.ndarray
    num_slots: int = SAMPLES


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The instances, and what is known of them."""

    pool: ActorPool
    workload: Workload
    rates: Rates
    kv_bytes_per_token: float
    earlier_lengths: np.ndarray
    "what the policy knows of another rollout, as in every iteration but the first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The rollouts of a scene, round by round."""

    seconds: dict[str, list[float]]
    "by way"
    perfect_shares: list[float]
    "of static's time, what perfect reallocation saves in the simulator"
    looks: list[Rates]
    "before the first round and after every one"

    def gap_closed(self) -> list[float]:
        """Of what perfect reallocation saves, what ours saves.

        In shares of static's time: the machine's pace drifts within a round, and what the simulator knows does not.
        """
        rounds = zip(self.seconds[STATIC.name], self.seconds[OURS.name], self.perfect_shares, strict=True)
        return [(1.0 - ours_s / static_s) / share for static_s, ours_s, share in rounds]


def run(bench: Bench) -> int:
    """Run the benchmark, or on the real model; returns 0."""
    mode, data = bench.mode, bench.data
    if bench.is_real:
        return _real(bench)
    console, figures, rows = bench.console, bench.figures, bench.rows
    workload = _long(pair_workload("large", SAMPLES, data))
    kv_bytes = _kv_bytes_per_token(workload)
    profile = profile_of(workload, budget_s=PROFILE_S[mode]).profile
    figures.values["plan_1024_ms"] = 1e3 * plan_seconds(1024, kv_bytes)
    figures.values["reallocate_1024_ms"] = 1e3 * reallocate_seconds(1024, kv_bytes)
    errors: list[float] = []
    with bench_ray("bench-rollout"):
        with _pool(workload, SpeculationConfig(), profile) as pool:
            stage = _stage(pool, workload, kv_bytes, ROUNDS[mode])
            figures.values["alone_speedup"] = stage.rates.alone_speedup
            _resident(stage, mode, figures, rows, errors, console)
        with _pool(workload, SpeculationConfig(), profile, num_slots=CAPPED_SLOTS) as pool:
            stage = _look(replace(stage, pool=pool))
            skew = _scene("skewed capped", "skewed", 0, num_slots=CAPPED_SLOTS)
            ways = (STATIC, PULL, RECOMPUTE, PAPER, OURS)
            played = _play(stage, skew, ways, MORE_ROUNDS * ROUNDS[mode], rows, errors, console)
            _keep(figures, "skewed", played.seconds)
            figures.keep("skewed_gap_closed", played.gap_closed())
        _over_plain_static(skew, workload, figures, rows, console)
    figures.values["busy_pull_over_static"] = _busy_pull_over_static(rows)
    # of what we ship: the paper's rule, say, computes caches anew
    overheads = [row["overhead_share"] for row in rows if row["way"] == OURS.name]
    figures.values["overhead_share"] = statistics.fmean(overheads)
    figures.values["overhead_share_worst"] = max(overheads)
    figures.values["simulator_relative_error"] = statistics.median(errors)
    figures.values["simulator_relative_error_worst"] = max(errors)
    worst = [value for name, value in figures.values.items() if name.startswith("ours_over_paper_rule_")]
    figures.values["ours_over_paper_rule_worst"] = min(worst)
    console.print(f"written {bench.write(samples=SAMPLES)}")
    return 0


def _resident(
    stage: Stage,
    mode: str,
    figures: Figures,
    rows: list[dict[str, Any]],
    errors: list[float],
    console: PipeConsole,
) -> None:
    ways = (STATIC, PULL, RECOMPUTE, PAPER, OURS)
    skew = _scene("skewed resident", "skewed", 0)
    played = _play(_look(stage), skew, ways, ROUNDS[mode], rows, errors, console)
    _keep(figures, "skewed_resident", played.seconds)
    figures.keep("skewed_resident_gap_closed", played.gap_closed())
    even, rounds = _scene("balanced", "balanced", 1), MORE_ROUNDS * ROUNDS[mode]
    stage = replace(stage, rates=played.looks[-1])
    played = _play(stage, even, (STATIC, PULL, PAPER, OURS), rounds, rows, errors, console)
    _keep(figures, "balanced", played.seconds)
    moves = [row["moves"] for row in rows if row["scene"] == "balanced" and row["way"] == OURS.name]
    figures.values["balanced_moves_per_100_samples"] = 100.0 * statistics.fmean(moves) / SAMPLES
    tails: dict[str, list[float]] = {}
    for seed in range(SEEDS[mode]):
        scene = _scene(f"long tail {seed}", "long_tail", 100 + seed)
        # each way first and last by turns: the machine's pace drifts
        ways = (PULL, PAPER, OURS) if seed % 2 == 0 else (OURS, PAPER, PULL)
        stage = replace(stage, rates=played.looks[-1])
        played = _play(stage, scene, ways, TAIL_ROUNDS[mode], rows, errors, console)
        for way, seconds in played.seconds.items():
            tails.setdefault(way, []).append(statistics.fmean(seconds))
    figures.keep("long_tail_over_pull_median", _over(tails, OURS, PULL))
    figures.keep("ours_over_paper_rule_long_tail", _over(tails, OURS, PAPER))


def _over_plain_static(
    scene: Scene, workload: Workload, figures: Figures, rows: list[dict[str, Any]], console: PipeConsole
) -> None:
    """Speculation and reallocation together, against neither."""
    with _pool(workload, SpeculationConfig(policy="off"), None) as pool:
        outcome = pool.rollout(requests_of(workload, scene.lengths), binding="static")
    rows.append(_row("skewed resident", "plain static", outcome))
    ours = [row["seconds"] for row in rows if row["scene"] == "skewed resident" and row["way"] == OURS.name]
    figures.values["all_over_plain_static"] = outcome.seconds / statistics.median(ours)
    console.print(f"plain static: {outcome.seconds:.2f} s")


def _long(workload: Workload) -> Workload:
    return replace(workload, sampling=replace(workload.sampling, max_new_tokens=MAX_TOKENS))


def _stage(pool: ActorPool, workload: Workload, kv_bytes: float, rounds: int) -> Stage:
    earlier = _lengths("long_tail", EARLIER_SEED)
    return Stage(
        pool=pool,
        workload=workload,
        rates=measured_rates(pool, workload, earlier[::INSTANCES], rounds),
        kv_bytes_per_token=kv_bytes,
        earlier_lengths=earlier,
    )


def _look(stage: Stage) -> Stage:
    """The stage at the pace that the machine has now."""
    rates = stage.rates.at_this_pace(stage.pool, stage.workload, stage.earlier_lengths)
    return replace(stage, rates=rates)


def _scene(name: str, lengths: WorkloadName, seed: int, *, num_slots: int = SAMPLES) -> Scene:
    return Scene(name=name, lengths=_lengths(lengths, seed), num_slots=num_slots)


def _lengths(name: WorkloadName, seed: int) -> np.ndarray:
    return drawn_lengths(name, SAMPLES, INSTANCES, max_new_tokens=MAX_TOKENS, seed=seed)


def _play(
    stage: Stage,
    scene: Scene,
    ways: Sequence[Way],
    rounds: int,
    rows: list[dict[str, Any]],
    errors: list[float],
    console: PipeConsole,
) -> Played:
    """Play every way, in turn forwards and backwards; each beside the simulator's word on it.

    The stage's rates are those of a look just before; the simulator has the mean of those before and after a round,
    because the machine's pace drifts.
    """
    played = Played(seconds={way.name: [] for way in ways}, perfect_shares=[], looks=[stage.rates])
    for number in range(rounds):
        outcomes = [
            (
                way,
                stage.pool.rollout(
                    requests_of(stage.workload, scene.lengths),
                    reallocation=_policy(stage, way),
                    binding=way.binding,
                ),
            )
            for way in (ways if number % 2 == 0 else reversed(ways))
        ]
        before, stage = stage.rates, _look(stage)
        played.looks.append(stage.rates)
        meanwhile = replace(stage, rates=before.halfway_to(stage.rates))
        perfect_s, static_s = _perfect(meanwhile, scene), _simulated(meanwhile, scene, STATIC)
        played.perfect_shares.append(1.0 - perfect_s / static_s)
        console.print(f"{scene.name}: simulated {static_s:.2f} s static, {perfect_s:.2f} perfect")
        for way, outcome in outcomes:
            played.seconds[way.name].append(outcome.seconds)
            predicted_s = _simulated(meanwhile, scene, way)
            errors.append(abs(predicted_s / outcome.seconds - 1.0))
            rows.append(_row(scene.name, way.name, outcome) | {"simulated_s": predicted_s})
    medians = {name: f"{statistics.median(seconds):.2f}" for name, seconds in played.seconds.items()}
    console.print(f"{scene.name}: seconds {medians}")
    return played


def _keep(figures: Figures, scene: str, seconds: dict[str, list[float]]) -> None:
    figures.keep(f"{scene}_over_static", _over(seconds, OURS, STATIC))
    figures.keep(f"{scene}_over_pull", _over(seconds, OURS, PULL))
    figures.keep(f"ours_over_paper_rule_{scene}", _over(seconds, OURS, PAPER))


def _over(seconds: dict[str, list[float]], a: Way, b: Way) -> list[float]:
    """How many times as fast `a` is, round by round."""
    return [slow / fast for slow, fast in zip(seconds[b.name], seconds[a.name], strict=True)]


def _perfect(stage: Stage, scene: Scene) -> float:
    return perfect_finish_s(_samples(stage, scene), _setup(stage, scene))


def _simulated(stage: Stage, scene: Scene, way: Way) -> float:
    policy = _policy(stage, way)
    binding = "static" if way.binding == "static" else "pull"
    return simulate(_samples(stage, scene), _setup(stage, scene), policy, binding=binding).finish_s


def _samples(stage: Stage, scene: Scene) -> Samples:
    prompt_tokens = statistics.fmean(len(prompt.token_ids) for prompt in stage.workload.prompts)
    return samples_of(scene.lengths, prompt_tokens=round(prompt_tokens))


def _setup(stage: Stage, scene: Scene) -> PoolSetup:
    return PoolSetup(
        num_instances=INSTANCES,
        num_slots=scene.num_slots,
        curve=stage.rates.curve,
        alone_curve=stage.rates.alone_curve,
        max_new_tokens=stage.workload.sampling.max_new_tokens,
        moves=MoveTruth(kv_bytes_per_token=stage.kv_bytes_per_token),
        poll_interval_s=0.1,
        prompt_token_s=stage.rates.prompt_token_s,
    )


def _row(scene: str, way: str, outcome: RolloutOutcome) -> dict[str, Any]:
    moved = [move for move in outcome.moves if move.outcome == MoveOutcome.MOVED]
    busy = [stats.busy_s for stats in outcome.stats.values()]
    overheads = overhead_shares(outcome)
    return overheads | {
        "scene": scene,
        "way": way,
        "seconds": outcome.seconds,
        "moves": len(outcome.moves),
        "moved": len(moved),
        "recomputed": sum(move.order.mode == "recompute" for move in moved),
        "busy_share": statistics.fmean(busy) / outcome.seconds,
        "overhead_share": sum(overheads.values()),
        "tokens": sum(stats.num_emitted_tokens for stats in outcome.stats.values()),
    }


def _busy_pull_over_static(rows: Sequence[dict[str, Any]]) -> float:
    """Seconds of decoding for the same tokens when both instances decode all the time, over those when one idles.

    Above 1 by what instances of one machine take from each other: so much of what moves gain is lost to them here.
    """
    busy_s = {
        way.name: statistics.median(
            row["busy_share"] * row["seconds"]
            for row in rows
            if (row["scene"], row["way"]) == ("skewed capped", way.name)
        )
        for way in (STATIC, PULL)
    }
    return busy_s[PULL.name] / busy_s[STATIC.name]


def _policy(stage: Stage, way: Way) -> ReallocationPolicy | None:
    return policy_of(way, stage.rates.curve, stage.kv_bytes_per_token, stage.earlier_lengths.tolist())


def _pool(
    workload: Workload,
    speculation: SpeculationConfig,
    profile: Profile | None,
    *,
    num_slots: int = SAMPLES,
) -> ActorPool:
    return ActorPool(
        workload,
        engine=EngineConfig(max_running_samples=num_slots, probe=False),
        speculation=speculation,
        profile=profile and _for_slots(profile, num_slots),
        migration=ReallocationConfig(),
    )


def _for_slots(profile: Profile, num_slots: int) -> Profile:
    """The profile covers fewer slots too: it was swept over numbers of samples."""
    return replace(profile, provenance=replace(profile.provenance, num_slots=num_slots))


def _kv_bytes_per_token(workload: Workload) -> float:
    models = (workload.paths.target, workload.paths.draft)
    return float(sum(KVShape.of(load_causal_lm(str(p), "float32").config).token_bytes for p in models))
