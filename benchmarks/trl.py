"""A GRPO step of SmolLM2-135M-Instruct by TRL, by TRL with our rollouts, and by our own run; an SFT step by both.

All three see the same prompts, samples, tokens, learning rate and dense reward, in float32 on two threads, and take one
optimizer step an iteration. `step_over_trl` is TRL's seconds over ours, `memory_over_trl` ours over TRL's: the peak of
all processes together, shared pages counted once. `rollouts_over_trl` is TRL's own step over the one with our rollouts.
`last_reward` is of the last step, one a seed: learning does not differ where the intervals of all sides overlap. Steps
of SFT learn from the same rows each (`sft_over_trl`), so that their losses are comparable too.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import RlhfSpecError
from ..core.metrics import read_metrics
from ..learning.tasks.one_sentence import SUBJECTS, draw_prompts
from .memory.processes import peak_memory
from .peers.build import TRL_RELEASES, trl_folder
from .peers.trl_trainer import LEARNING_RATE, NEW_TOKENS, PROMPTS_A_STEP, SAMPLES
from .support.harness import Bench
from .support.processes import run_command, setting_words
from .support.result import ROOT
from .support.runs import SMOLLM2, train
from .support.workload import real_model

STEPS = {"quick": 1, "default": 1, "full": 8}
"Measured in a run; the first step before them is left out."
SEEDS = {"quick": 1, "default": 2, "full": 5}
"Of sampling: each is a run of every side, in an order that the next turns round."
THREADS = 2
_LAST_CHARS = 1500
BESIDE = (
    ("trl", "ours", "step_over_trl"),
    ("trl", "rollouts", "rollouts_over_trl"),
    ("trl_sft", "sft", "sft_over_trl"),
    ("trl_dpo", "dpo", "dpo_over_trl"),
)
"Whose seconds are over whose."
EXAMPLES = 16
"Rows of a step of SFT, or of DPO."
Row = Mapping[str, float]


def run(bench: Bench) -> int:
    """Write OUT/trl.json; returns 0. Nothing where TRL or the model cannot be had."""
    folder, model = trl_folder(TRL_RELEASES[-1]), real_model(bench.console)
    if folder is None or model is None:
        bench.console.print(
            "skipped: no TRL; run python -m rlhfspec.benchmarks.peers.build --only trl", markup=False
        )
        return 0
    out, steps = bench.out, STEPS[bench.mode] + 1
    prompts, examples = write_prompts(out / "prompts.jsonl", steps), _write_examples(out / "examples.jsonl")
    order = {"model": str(model), "out": str(out / "trl"), "steps": steps, "threads": THREADS}
    dpo = dpo_sides(out, folder, model, steps)
    sft, grpo = {"task": "sft", "rows": str(examples)}, {"task": "grpo", "rows": str(prompts)}
    sides: dict[str, Callable[[int], list[Row]]] = {
        "trl": lambda seed: by_trl(folder, order | grpo | {"seed": seed, "rollouts": "own"}),
        "rollouts": lambda seed: by_trl(folder, order | grpo | {"seed": seed, "rollouts": "ours"}),
        "ours": lambda seed: by_us(out, prompts, steps, seed),
        "trl_sft": lambda seed: by_trl(folder, order | sft | {"seed": seed}),
        "sft": lambda seed: _supervised_by_us("sft", out, model, examples, steps, seed),
        "trl_dpo": dpo["theirs"],
        "dpo": dpo["ours"],
    }
    rows: dict[str, list[Row]] = {name: [] for name in sides}
    for seed in range(SEEDS[bench.mode]):
        for name in list(sides)[:: -1 if seed % 2 else 1]:
            with peak_memory() as peak:
                made = sides[name](seed)
            rows[name] += made[1:]
            bench.rows += [
                {"side": name, "seed": seed, "step": step, "peak_bytes": float(peak.bytes), **row}
                for step, row in enumerate(made)
            ]
            bench.console.print(f"{name}, seed {seed}: {made}, {peak}", markup=False)
            _figures(bench, rows)
            bench.write(steps=steps - 1, trl=TRL_RELEASES[-1])
    return 0


def dpo_sides(out: Path, folder: Path, model: Path, steps: int) -> dict[str, Callable[[int], list[Row]]]:
    """DPO's steps on the same pairs by TRL, which lies in `folder`, and by us; each takes a seed."""
    pairs = _write_pairs(out / "pairs.jsonl", _write_examples(out / "examples.jsonl"))
    order = {"model": str(model), "out": str(out / "trl"), "steps": steps, "threads": THREADS}
    dpo = {"task": "dpo", "rows": str(pairs), "settings": {"precompute_ref_log_probs": True}}
    return {
        "theirs": lambda seed: by_trl(folder, order | dpo | {"seed": seed}),
        "ours": lambda seed: _supervised_by_us("dpo", out, model, pairs, steps, seed),
    }


def _figures(bench: Bench, rows: Mapping[str, list[Row]]) -> None:
    """What is known so far."""
    values = bench.figures.values
    for name, made in rows.items():
        if not made:
            continue
        for part in made[0]:
            values[f"{part}_{name}"] = statistics.fmean(row[part] for row in made)
        of_side = [row for row in bench.rows if row["side"] == name]
        values[f"peak_gb_{name}"] = max(row["peak_bytes"] for row in of_side) / 1e9
        last = max(row["step"] for row in of_side)
        learned = "reward" if "reward" in made[0] else "loss"
        bench.figures.keep(f"last_{learned}_{name}", [row[learned] for row in of_side if row["step"] == last])
    for theirs, name, ratio in BESIDE:
        if rows[theirs] and rows[name]:
            over = [a["step_s"] / b["step_s"] for a, b in zip(rows[theirs], rows[name], strict=False)]
            bench.figures.keep(ratio, over)
            values[f"memory_over_trl_{name}"] = values[f"peak_gb_{name}"] / values[f"peak_gb_{theirs}"]


def write_prompts(path: Path, steps: int) -> Path:
    """Questions for so many steps, the same in each call."""
    drawn = draw_prompts(PROMPTS_A_STEP * steps, np.random.default_rng(0))
    path.write_text("".join(f"{json.dumps({'question': q, 'answer': a})}\n" for q, a in drawn))
    return path


def _write_examples(path: Path) -> Path:
    """Chats of one turn, whose answers are one to six sentences long."""
    rng = np.random.default_rng(1)
    rows = []
    for index, (question, subject) in enumerate(draw_prompts(EXAMPLES, rng)):
        others = rng.choice(SUBJECTS, size=(1 + index % 6, 2))
        answer = " ".join(f"The {subject} is near the {one} and far from the {two}." for one, two in others)
        turns = {"prompt": ("user", question), "completion": ("assistant", answer)}
        rows.append({key: [{"role": role, "content": said}] for key, (role, said) in turns.items()})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def _write_pairs(path: Path, examples: Path) -> Path:
    """The examples, each beside the answer to the next: every prompt twice, as pairs have it."""
    rows = [json.loads(line) for line in examples.read_text().splitlines()]
    pairs = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}
        for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in pairs))
    return path


def by_trl(trl: Path, order: Mapping[str, Any]) -> list[Row]:
    """A run of theirs, which lies in `trl`; `order` as of `peers.trl_trainer`. One row a step."""
    done = subprocess.run(
        [sys.executable, "-m", "rlhfspec.benchmarks.peers.trl_trainer", json.dumps(order)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{trl}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": str(order["threads"])},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RlhfSpecError(f"TRL ended with {done.returncode}; it said: {done.stderr[-_LAST_CHARS:]}")
    rows = json.loads(done.stdout.splitlines()[-1])
    if order["task"] != "grpo":
        return rows
    # with our rollouts weights go to the engine as it is asked
    return [row | {"update_s": row["step_s"] - row["generate_s"], "publish_s": 0.0} for row in rows]


def by_us(out: Path, prompts: Path, steps: int, seed: int, more: Sequence[str] = ()) -> list[Row]:
    """A run of ours; `more` settings. One row a step."""
    settings = {
        "run.seed": seed,
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
    made = train(SMOLLM2, out, "ours", [*(f"{key}={value}" for key, value in settings.items()), *more])
    return [
        {
            "step_s": row["time/iteration_s"],
            "generate_s": row["time/generate_s"],
            "update_s": row["time/update_s"],
            "publish_s": row["time/publish_s"],
            "reward": row["reward/mean"],
            "tokens": row["rollout/response_tokens_mean"] * PROMPTS_A_STEP * SAMPLES,
            "acceptance": row["rollout/mean_acceptance_length"],
        }
        for row in made.metrics
    ]


def _supervised_by_us(kind: str, out: Path, model: Path, examples: Path, steps: int, seed: int) -> list[Row]:
    settings = {
        "run.seed": seed,
        "data.eval_share": 0,
        "trainer.batch_size": EXAMPLES,
        "trainer.max_steps": steps,
        "trainer.schedule": "constant",
        "trainer.learning_rate": LEARNING_RATE,
        "trainer.adam_betas": "[0.9, 0.95]",
        "trainer.num_threads": THREADS,
    }
    folder = out / f"{kind}_{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    words = [kind, "--model", str(model), "--data", str(examples), "--out", str(folder)]
    words += setting_words(f"{key}={value}" for key, value in settings.items())
    run_command(words, folder=ROOT, log=out / f"{kind}.log")
    made = read_metrics(folder / "metrics.jsonl")
    return [{"step_s": row["time/step_s"], "loss": row["train/loss"]} for row in made if "time/step_s" in row]
