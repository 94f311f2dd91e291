"""Generation ahead of learning on the demo's letter chains: what it gains, what it costs in reward, what it keeps.

Every run is `rlhfspec train` with a shipped config, in a process of its own. The step's time is taken where one
instance and the trainer have a core each; generation is made about as long as the update by decoding plainly in few
slots.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from ..cluster.folder.rollouts import locations_in, rollout_files
from ..cluster.verify.verify_run import verify_run
from .support.harness import Bench
from .support.runs import GRPO, PPO, Metrics, train

ONE_CORE_EACH = (
    "cluster.generation.num_actors=1",
    "cluster.generation.num_cpus=1",
    "algorithm.kl_coef=0",
    "speculation.policy=off",
    "speculation.drafter=none",
    "engine.max_running_samples=3",
    "rollout.samples_per_prompt=4",
)
PLAIN = (
    "speculation.policy=off",
    "speculation.drafter=none",
    "engine.max_running_samples=1",
    "cluster.generation.num_actors=1",
)
"Long enough beside an update of the demo for versions to come in the midst of responses."
PROVED = (
    (1, "reprefill", "recorded"),
    (2, "reprefill", "recorded"),
    (2, "drain", "recorded"),
    (1, "reprefill", "free"),
    (2, "reprefill", "free"),
)
MAX_NEW_TOKENS = {"recorded": 32, "free": 256}
"Of what is proved. The demo's responses are short: half of them are longer than a phase's share of 32."
STEP_PROMPTS = {"quick": 8, "default": 24, "full": 48}
OVER_SYNC = {
    "ahead1": "async_over_sync_step",
    "ahead2": "async2_over_sync_step",
    "free1": "free_over_sync_step",
    "free2": "free2_over_sync_step",
}
STEP_ITERATIONS = {"quick": 3, "default": 6, "full": 8}
STEP_ROUNDS = {"quick": 1, "default": 1, "full": 3}
PROVED_ITERATIONS = {"quick": 3, "default": 8, "full": 12}
REWARD_ITERATIONS = {"quick": 3, "default": 15, "full": 30}
SEEDS = {"quick": (0,), "default": (0, 1, 2), "full": (0, 1, 2, 3, 4)}
LAST = 3
"Iterations whose mean is the reward that a run ends with."
CORRECTED = "algorithm.correction.kind=tis"


def run(bench: Bench) -> int:
    """Write OUT/pipeline.json; returns 0, or 1 where a sample differs or is staler than its run allows."""
    for part in (_steps, _proofs, _rewards):
        part(bench)
        bench.write()
    values = bench.figures.values
    stale = any(values[f"max_observed_staleness_{k}"] > k for k in (1, 2))
    return 1 if values["replay_mismatches"] or values["unequal_runs"] or stale else 0


def _proofs(bench: Bench) -> None:
    """Two runs of a seed at staleness 1 and 2, either way to load weights: equal, provable, never too stale."""
    differences = generated = switched = unequal = 0
    for staleness, load, schedule in PROVED:
        name = f"proof{staleness}{load}{schedule}"
        settings = [
            f"run.iterations={PROVED_ITERATIONS[bench.mode]}",
            "run.checkpoint_every=1",
            f"sampling.max_new_tokens={MAX_NEW_TOKENS[schedule]}",
            f"rollout.max_staleness={staleness}",
            f"rollout.weight_load={load}",
            f"rollout.schedule={schedule}",
            CORRECTED,
            *(PLAIN if schedule == "free" else ()),
        ]
        run = train(PPO, bench.out, name, settings).folder
        if schedule == "recorded":
            # when a version comes is not promised by the other: only that it is recorded
            again = train(PPO, bench.out, name + "again", settings).folder
            unequal += _noted(run) != _noted(again)
        proof = verify_run(run, share=1.0)
        differences += len(proof.differences)
        generated += proof.num_regenerated
        lags = _lags(run)
        switched += sum(len(versions) > 1 for versions in lags)
        figure = f"max_observed_staleness_{staleness}"
        bench.figures.values[figure] = max(
            bench.figures.values.get(figure, 0.0), *(float(max(one)) for one in lags)
        )
        bench.console.print(
            f"staleness {staleness}, {load}, {schedule}: {proof.num_regenerated} samples, {proof.differences}"
        )
    bench.figures.values |= {
        "replay_mismatches": float(differences),
        "replayed_samples": float(generated),
        "samples_of_several_versions": float(switched),
        "unequal_runs": float(unequal),
    }


def _steps(bench: Bench) -> None:
    """Seconds of an iteration of the synchronous run over those of a run one version ahead, in turn."""
    ways: Mapping[str, Sequence[str]] = {
        "sync": (),
        "ahead1": ("rollout.max_staleness=1", CORRECTED),
        "ahead2": ("rollout.max_staleness=2", CORRECTED),
        "free1": ("rollout.max_staleness=1", "rollout.schedule=free", CORRECTED),
        "free2": ("rollout.max_staleness=2", "rollout.schedule=free", CORRECTED),
    }
    common = [
        *ONE_CORE_EACH,
        f"run.iterations={STEP_ITERATIONS[bench.mode]}",
        f"rollout.prompts_per_iteration={STEP_PROMPTS[bench.mode]}",
    ]
    taken: dict[str, list[float]] = {name: [] for name in ways}
    parts: dict[str, dict[str, list[float]]] = {
        part: {name: [] for name in ways} for part in ("generate", "update")
    }
    balance = []
    for _ in range(STEP_ROUNDS[bench.mode]):
        for name in (*ways, *reversed(ways)):
            metrics = train(GRPO, bench.out, f"step{name}", [*common, *ways[name]]).metrics
            # the first fills the pipeline, the last has nothing to sample
            inner = metrics[1:-1]
            taken[name].append(statistics.median(row["time/iteration_s"] for row in inner))
            parts["generate"][name] += [row["time/generate_s"] for row in inner]
            parts["update"][name] += [
                row["time/update_s"] + row.get("time/update_hidden_s", 0.0) for row in inner
            ]
            if name == "sync":
                balance += [row["time/generate_s"] / row["time/update_s"] for row in inner]
    bench.figures.values["generate_over_update"] = statistics.median(balance)
    for name, figure in OVER_SYNC.items():
        bench.figures.keep(figure, [a / b for a, b in zip(taken["sync"], taken[name], strict=True)])
    # cores of their own share caches and memory
    for part, seconds in parts.items():
        beside, alone = (statistics.median(seconds[name]) for name in ("ahead1", "sync"))
        bench.figures.values[f"{part}_s_beside_over_alone"] = beside / alone
    bench.console.print(f"seconds of an iteration: {taken}", markup=False)


def _rewards(bench: Bench) -> None:
    """The reward that runs end with, against the synchronous run of the same seed."""
    ways: Mapping[str, Sequence[str]] = {
        "staleness0": (),
        "staleness1": ("rollout.max_staleness=1", CORRECTED),
        "staleness1_free": ("rollout.max_staleness=1", "rollout.schedule=free", CORRECTED),
        "staleness2": ("rollout.max_staleness=2", CORRECTED),
        "staleness2_free": ("rollout.max_staleness=2", "rollout.schedule=free", CORRECTED),
        "staleness2_uncorrected": ("rollout.max_staleness=2", "algorithm.correction.kind=none"),
    }
    ended: dict[str, list[float]] = {name: [] for name in ways}
    for seed in SEEDS[bench.mode]:
        for name, settings in ways.items():
            common = [f"run.iterations={REWARD_ITERATIONS[bench.mode]}", f"run.seed={seed}"]
            ended[name].append(_last_reward(train(PPO, bench.out, name, [*common, *settings]).metrics))
    for name, rewards in ended.items():
        bench.figures.values[f"reward_{name}"] = statistics.fmean(rewards)
        if name != "staleness0":
            gaps = [sync - own for sync, own in zip(ended["staleness0"], rewards, strict=True)]
            bench.figures.values[f"reward_gap_{name}"] = statistics.fmean(gaps)
    bench.console.print(f"rewards at the end: {ended}", markup=False)


def _last_reward(metrics: Metrics) -> float:
    return statistics.fmean(row["reward/mean"] for row in metrics[-LAST:])


def _noted(run: Path) -> list[str]:
    """Checksums of every version, and all that was sampled."""
    files = [pq.read_table(file, columns=["response_token_ids", "reward"]) for file in rollout_files(run)]
    return [(run / "weights.jsonl").read_text(), *(str(table.to_pydict()) for table in files)]


def _lags(run: Path) -> list[list[int]]:
    """Of every sample: how many versions each of its own is behind its update."""
    return [
        [location.iteration - version for version in location.weight_versions]
        for file in rollout_files(run)
        for location in locations_in(file)
    ]
