"""A GRPO step of SmolLM2-135M-Instruct by TRL, by TRL with our rollouts, and by our own run: seconds, memory, reward.

All three see the same prompts, samples, tokens, learning rate and dense reward, in float32 on two threads, and take one
optimizer step an iteration. `step_over_trl` is TRL's seconds over ours, `memory_over_trl` ours over TRL's: the peak of
all processes together, shared pages counted once. `rollouts_over_trl` is TRL's own step over the one with our rollouts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.peers.build import TRL_RELEASES, trl_folder
from benchmarks.peers.trl_trainer import LEARNING_RATE, NEW_TOKENS, PROMPTS_A_STEP, SAMPLES
from benchmarks.support.harness import Bench
from benchmarks.support.processes import descendants
from benchmarks.support.result import ROOT
from benchmarks.support.runs import SMOLLM2, train
from benchmarks.support.workload import real_model
from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.core.proc_files import PROC, sizes
from rlhfspec.learning.tasks.one_sentence import draw_prompts

STEPS = {"quick": 1, "default": 3, "full": 8}
"Measured in a run; the first step before them is left out."
ORDER = ("trl", "rollouts", "ours", "ours", "rollouts", "trl")
THREADS = 2
_POLL_S = 0.5
_LAST_CHARS = 1500
Row = Mapping[str, float]


def run(bench: Bench) -> int:
    """Write OUT/trl.json; returns 0. Nothing where TRL or the model cannot be had."""
    folder, model = trl_folder(TRL_RELEASES[-1]), real_model(bench.console)
    if folder is None or model is None:
        bench.console.print("skipped: no TRL; run python -m benchmarks.peers.build --only trl", markup=False)
        return 0
    steps = STEPS[bench.mode] + 1
    prompts = _write_prompts(bench.out / "prompts.jsonl", steps)
    sides: dict[str, Callable[[], list[Row]]] = {
        "trl": lambda: _by_trl(bench.out, folder, model, prompts, steps, "own"),
        "rollouts": lambda: _by_trl(bench.out, folder, model, prompts, steps, "ours"),
        "ours": lambda: _by_us(bench.out, prompts, steps),
    }
    rows: dict[str, list[Row]] = {name: [] for name in sides}
    for name in ORDER[: len(sides)] if bench.is_quick else ORDER:
        with peak_memory() as peak:
            made = sides[name]()
        rows[name] += made[1:]
        bench.rows += [{"side": name, "peak_bytes": float(peak[0]), **row} for row in made]
        bench.console.print(f"{name}: {made}, {peak[0] / 1e9:.1f} GB", markup=False)
        _figures(bench, rows)
        bench.write(steps=steps - 1, trl=TRL_RELEASES[-1])
    return 0


def _figures(bench: Bench, rows: Mapping[str, list[Row]]) -> None:
    """What is known so far."""
    values = bench.figures.values
    for name, made in rows.items():
        for part in ("step_s", "generate_s", "reward", "tokens", "acceptance") if made else ():
            values[f"{part}_{name}"] = statistics.fmean(row[part] for row in made)
        if made:
            peaks = [row["peak_bytes"] for row in bench.rows if row["side"] == name]
            values[f"peak_gb_{name}"] = max(peaks) / 1e9
    for name in ("rollouts", "ours"):
        if rows[name]:
            over = [a["step_s"] / b["step_s"] for a, b in zip(rows["trl"], rows[name], strict=False)]
            bench.figures.keep("step_over_trl" if name == "ours" else "rollouts_over_trl", over)
            values[f"memory_over_trl_{name}"] = values[f"peak_gb_{name}"] / values["peak_gb_trl"]


def _write_prompts(path: Path, steps: int) -> Path:
    drawn = draw_prompts(PROMPTS_A_STEP * steps, np.random.default_rng(0))
    path.write_text("".join(f"{json.dumps({'question': q, 'answer': a})}\n" for q, a in drawn))
    return path


def _by_trl(out: Path, trl: Path, model: Path, prompts: Path, steps: int, rollouts: str) -> list[Row]:
    order = {
        "model": str(model),
        "prompts": str(prompts),
        "out": str(out / "trl"),
        "steps": steps,
        "rollouts": rollouts,
        "threads": THREADS,
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers.trl_trainer", json.dumps(order)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{trl}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": str(THREADS)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RlhfSpecError(f"TRL ended with {done.returncode}; it said: {done.stderr[-_LAST_CHARS:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _by_us(out: Path, prompts: Path, steps: int) -> list[Row]:
    settings = {
        "run.iterations": steps,
        "data.task": "null",
        "data.path": prompts,
        "data.shuffle": "false",
        "reward.kind": "one_sentence",
        "sampling.max_new_tokens": NEW_TOKENS,
        "rollout.prompts_per_iteration": PROMPTS_A_STEP,
        "rollout.samples_per_prompt": SAMPLES,
        "trainer.minibatch_size": PROMPTS_A_STEP * SAMPLES,
        "trainer.learning_rate": LEARNING_RATE,
        "trainer.num_threads": THREADS,
    }
    made = train(SMOLLM2, out, "ours", [f"{key}={value}" for key, value in settings.items()])
    return [
        {
            "step_s": row["time/iteration_s"],
            "generate_s": row["time/generate_s"],
            "reward": row["reward/mean"],
            "tokens": row["rollout/response_tokens_mean"] * PROMPTS_A_STEP * SAMPLES,
            "acceptance": row["rollout/mean_acceptance_length"],
        }
        for row in made.metrics
    ]


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """The most bytes that all processes below this one held together in the block, shared pages counted once."""
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_S):
            held = (sizes(PROC / str(pid) / "smaps_rollup").get("Pss", 0) for pid in descendants(os.getpid()))
            peak[0] = max(peak[0], sum(held))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()
