"""GRPO, SFT or DPO by TRL in its own process: python -m rlhfspec.benchmarks.peers.trl_trainer ORDER, a JSON object.

    {"task": "grpo", "model": folder, "rows": file, "out": folder, "steps": 4, "seed": 0, "rollouts": "own" or "ours",
     "threads": 2}

TRL is on the path. Prints one line of JSON, an object a step. GRPO: seconds of it and of its generation, by the clock
and of processors, its reward, and what our engine accepted; a row of the file has `question` and `answer`, and each is
asked for the same number of responses. SFT and DPO: its seconds and loss; each row is learned from in every step.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback

from ...core.records import Prompt
from ...integrations.trl import rollout_func
from ...learning.tasks.one_sentence import one_sentence_reward

PROMPTS_A_STEP, SAMPLES, NEW_TOKENS, MICROBATCH, LEARNING_RATE = 2, 8, 32, 8, 2e-5
NOTHING = np.zeros(0, dtype=np.int64)


def main(order: dict[str, Any]) -> list[dict[str, float]]:
    """Train; one row a step."""
    torch.set_num_threads(order["threads"])
    rows = [json.loads(line) for line in Path(order["rows"]).read_text().splitlines()]
    return grpo(order, rows) if order["task"] == "grpo" else supervised(order, rows)


def grpo(order: dict[str, Any], rows: list[dict[str, str]]) -> list[dict[str, float]]:
    """`GRPOTrainer`, by its own generation or ours."""
    trl = importlib.import_module("trl")
    data = {
        "prompt": [[{"role": "user", "content": row["question"]}] for row in rows],
        "answer": [row["answer"] for row in rows],
    }
    num_samples = PROMPTS_A_STEP * SAMPLES
    args = trl.GRPOConfig(
        gradient_accumulation_steps=num_samples // MICROBATCH,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        loss_type="grpo",
        beta=0.0,
        shuffle_dataset=False,
        **settings_of(order),
    )
    ours = rollout_func() if order["rollouts"] == "ours" else None

    class Timed(trl.GRPOTrainer):
        """Notes when a step's generation and its update end."""

        began: list[np.ndarray] = []  # noqa: RUF012
        generated: list[np.ndarray] = []  # noqa: RUF012

        def _generate(self, *args: Any, **settings: Any) -> Any:
            self.began.append(now())
            try:
                return super()._generate(*args, **settings)
            finally:
                self.generated.append(now())

    trainer = Timed(
        model=order["model"],
        reward_funcs=rewards,
        train_dataset=Dataset.from_dict(data),
        args=args,
        rollout_func=ours,
    )
    trainer.train()
    ends = [*trainer.began[1:], now()]
    logged = [row for row in trainer.state.log_history if "reward" in row]
    engine = ours.engine if ours is not None else None
    return [
        {
            **dict(zip(("step_s", "step_cpu_s"), end - began, strict=True)),
            **dict(zip(("generate_s", "generate_cpu_s"), generated - began, strict=True)),
            "reward": row["reward"],
            "tokens": row["completions/mean_length"] * num_samples,
            "acceptance": engine.stats.mean_acceptance_length if engine is not None else 1.0,
        }
        for began, end, generated, row in zip(trainer.began, ends, trainer.generated, logged, strict=True)
    ]


def supervised(order: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """`SFTTrainer`, with a loss on completions, or `DPOTrainer`."""
    trl, kind = importlib.import_module("trl"), order["task"].upper()
    settings = settings_of(order) | order.get("settings", {})
    args = getattr(trl, f"{kind}Config")(gradient_accumulation_steps=len(rows) // MICROBATCH, **settings)
    ends: list[float] = []

    class Timed(TrainerCallback):
        """Notes when a step ends."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    trainer = getattr(trl, f"{kind}Trainer")(
        model=order["model"], train_dataset=Dataset.from_list(rows), args=args, callbacks=[Timed()]
    )
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return [
        {"step_s": end - begin, "loss": row["loss"]}
        for (begin, end), row in zip(pairwise(ends), logged, strict=True)
    ]


def settings_of(order: dict[str, Any]) -> dict[str, Any]:
    """Of both trainers."""
    return {
        "output_dir": order["out"],
        "max_steps": order["steps"],
        "seed": order["seed"],
        "per_device_train_batch_size": MICROBATCH,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
    }


def now() -> np.ndarray:
    """Seconds of the clock and of this process's processors."""
    return np.array([time.perf_counter(), time.process_time()])


def rewards(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """The one-sentence task's, of each response: dense, so that all samples are learned from."""
    return [
        one_sentence_reward(
            Prompt(prompt_id=0, token_ids=NOTHING, reference=subject), said[0]["content"]
        ).value
        for said, subject in zip(completions, answer, strict=True)
    ]


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
