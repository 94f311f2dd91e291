"""SFT -> reward model -> PPO from files by the command line alone, measured by a gold rule that PPO never sees.

Three seeds of the preference task: its base model has learned nothing, demonstrations slip, pairs are ordered by the
rule. With `--real` a few steps of SmolLM2-135M-Instruct with LoRA through the same commands, and no measure.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.rlhf_chain.stages import STAGES, gold_of, last_evaluation, run_stages
from benchmarks.rlhf_chain.task_files import NUM_HELD_OUT, write_chain, write_real_chain
from benchmarks.support.result import write_result
from benchmarks.support.timing import Figures
from benchmarks.support.workload import REAL_MODEL, default_cache_dir, job
from rlhfspec.cluster.observe.console import PipeConsole
from rlhfspec.core.errors import ModelError
from rlhfspec.core.metrics import read_metrics
from rlhfspec.learning.models.get import get_model

SEEDS = {"quick": 1, "default": 3, "full": 5}


def run(*, out: Path, mode: str, data: Path | None, real: bool = False) -> int:
    """Write OUT/chain.json, with `real` OUT/chain_real.json, and keep the runs in OUT/chain; returns 0."""
    console, figures = PipeConsole(), Figures()
    work = (out / ("chain_real" if real else "chain")).absolute()
    shutil.rmtree(work, ignore_errors=True)
    if real:
        return _real(work, out, mode, console)
    golds = []
    for seed in range(SEEDS[mode]):
        with job(f"the chain with seed {seed}"):
            chain = write_chain(work / f"seed_{seed}", seed=seed, quick=mode == "quick")
            seconds = run_stages(chain)
            before, _ = gold_of(chain.sft_model, seed=seed)
            after, _ = gold_of(chain.ppo_run() / "checkpoints" / "target", seed=seed)
        held_out = last_evaluation(chain.folder / "reward")
        golds.append((before, after))
        figures.values |= {
            f"reward_model_accuracy_seed{seed}": held_out["accuracy"],
            f"reward_model_margin_seed{seed}": held_out["margin"],
            f"gold_sft_seed{seed}": before,
            f"gold_ppo_seed{seed}": after,
            f"gold_gain_seed{seed}": after - before,
            f"chain_seconds_seed{seed}": sum(seconds.values()),
        }
        figures.values |= {f"{name}_seed{seed}": value for name, value in seconds.items()}
        console.print({name: value for name, value in figures.values.items() if name.endswith(f"seed{seed}")})
    seeds = range(len(golds))
    accuracies = [figures.values[f"reward_model_accuracy_seed{seed}"] for seed in seeds]
    gains = [after - before for before, after in golds]
    figures.values |= {
        "reward_model_accuracy": min(accuracies),
        "gold_gain_reward_model": min(gains),
        "gold_gain_mean": sum(gains) / len(gains),
        "chain_seconds": max(figures.values[f"chain_seconds_seed{seed}"] for seed in seeds),
    }
    provenance = {"mode": mode, "num_seeds": len(golds), "num_held_out_pairs": NUM_HELD_OUT}
    write_result(out, "chain", figures.values, figures.intervals, provenance=provenance)
    return 0


def _real(work: Path, out: Path, mode: str, console: PipeConsole) -> int:
    try:
        with job(f"getting {REAL_MODEL}") as tick:
            model = get_model(REAL_MODEL, default_cache_dir(), progress=tick).path
    except ModelError as error:
        console.print(f"skipped: {error}", markup=False)
        return 0
    with job(f"the chain on {REAL_MODEL}"):
        chain = write_real_chain(work, model=str(model), seed=0)
        seconds = run_stages(chain)
    num_steps = {
        "sft": len(read_metrics(work / "sft" / "metrics.jsonl")) - 1,
        "reward": len(read_metrics(work / "reward" / "metrics.jsonl")) - 1,
        "ppo": len(read_metrics(chain.ppo_run() / "metrics.jsonl")),
    }
    values = dict(seconds) | {f"{stage}_steps": float(num_steps[stage]) for stage in STAGES}
    console.print(values)
    write_result(out, "chain_real", values, provenance={"mode": mode, "model": REAL_MODEL})
    return 0
