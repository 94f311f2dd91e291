"""SFT -> reward model -> PPO from files by the command line alone, measured by a gold rule that PPO never sees.

Three seeds of the preference task: its base model has learned nothing, demonstrations slip, pairs are ordered by the
rule. With `--real` a few steps of SmolLM2-135M-Instruct with LoRA through the same commands, and no measure.

python -m rlhfspec.benchmarks.chain DIR [SEED]      writes the task's files, and the commands that use them
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from ..core.metrics import read_metrics
from ..engine.weights.loading import load_causal_lm, load_tokenizer
from ..learning.models.demo_pair import sample_responses
from ..learning.models.tokenization import token_id
from ..learning.tasks.one_sentence import draw_prompts
from .support.harness import Bench
from .support.preference_task import (
    MAX_ANSWER_WORDS,
    chat_tokenizer,
    draw_answer,
    draw_pair,
    draw_question,
    gold_score,
)
from .support.processes import run_command
from .support.workload import REAL_MODEL, job, real_model

NUM_DEMONSTRATIONS, NUM_PAIRS, NUM_HELD_OUT, NUM_PROMPTS = 6000, 4000, 500, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Where everything lies, and the commands in their order."""

    folder: Path
    base: str
    "path or known name of the model that supervised fine-tuning begins with"

    def commands(self) -> list[list[str]]:
        """Arguments of `rlhfspec`, one list a stage; each needs what the one before wrote."""
        here = self.folder
        return [
            ["sft", "--config", str(here / "sft.yaml"), "--model", self.base, "--out", str(here / "sft")],
            [
                "train-reward",
                *("--config", str(here / "reward.yaml"), "--model", str(self.sft_model)),
                *("--out", str(here / "reward")),
            ],
            ["train", "--config", str(here / "ppo.yaml")],
        ]

    @property
    def sft_model(self) -> Path:
        """The checkpoint that PPO starts from, and the reward model too."""
        return self.folder / "sft" / "checkpoints" / "model"

    @property
    def reward_model(self) -> Path:
        """The reward model's checkpoint."""
        return self.folder / "reward" / "checkpoints" / "model"

    def ppo_run(self) -> Path:
        """PPO's run folder, once there is one."""
        return next((self.folder / "runs").iterdir())


def write_chain(folder: Path, *, seed: int, quick: bool = False) -> Chain:
    """Write the preference task's files into a new folder; everything is drawn from the seed."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng([seed, 0xC4A1])
    questions = [draw_question(rng) for _ in range(NUM_DEMONSTRATIONS)]
    _write(folder / "sft.jsonl", (_talk(one.text, draw_answer(one, rng)) for one in questions))
    for name, count in (("pairs", NUM_PAIRS), ("held_out_pairs", NUM_HELD_OUT)):
        pairs = (draw_pair(rng) for _ in range(count))
        _write(
            folder / f"{name}.jsonl", (_preference(one.text, better, worse) for one, better, worse in pairs)
        )
    asked = (draw_question(rng) for _ in range(NUM_PROMPTS))
    # the subject is there for people; no setting names it
    _write(folder / "prompts.jsonl", ({"prompt": one.text, "subject": one.subject} for one in asked))
    _write_base(folder / "base", seed)
    chain = Chain(folder=folder, base=str(folder / "base"))
    shared = {"run": {"seed": seed}}
    few = {"max_steps": 20} if quick else {}
    optimizer = {"num_threads": 1, "schedule": "cosine", "warmup_steps": 10, "eval_every": 50, **few}
    _dump(
        folder / "sft.yaml",
        shared
        | {
            "data": {"path": str(folder / "sft.jsonl")},
            "trainer": {"learning_rate": 3e-3, "batch_size": 64, "epochs": 3, **optimizer},
        },
    )
    _dump(
        folder / "reward.yaml",
        shared
        | {
            "data": {
                "path": str(folder / "pairs.jsonl"),
                "eval_path": str(folder / "held_out_pairs.jsonl"),
            },
            "trainer": {"learning_rate": 1e-3, "batch_size": 32, "epochs": 6, **optimizer},
            "loss": {"center_rewards_coefficient": 0.01},
        },
    )
    _dump(folder / "ppo.yaml", _ppo(chain, seed, iterations=2 if quick else 20))
    return chain


def write_real_chain(folder: Path, *, model: str, seed: int) -> Chain:
    """Write files for a few steps of a real chat model with LoRA; they say nothing of quality."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng([seed, 0xC4A1])
    asked = draw_prompts(160, rng)
    _write(folder / "sft.jsonl", (_talk(question, _short(subject)) for question, subject in asked[:64]))
    _write(
        folder / "pairs.jsonl",
        (_preference(question, _short(subject), _long(subject)) for question, subject in asked[64:128]),
    )
    _write(folder / "prompts.jsonl", ({"prompt": question} for question, _ in asked[128:]))
    chain = Chain(folder=folder, base=model)
    lora = {"rank": 8, "alpha": 16.0}
    shared = {"run": {"seed": seed}}
    optimizer = {
        "learning_rate": 2e-4,
        "lora": lora,
        "batch_size": 8,
        "max_steps": 4,
        "max_tokens_per_forward": 512,
        "num_threads": 1,
        "eval_every": 0,
    }
    _dump(folder / "sft.yaml", shared | {"data": {"path": str(folder / "sft.jsonl")}, "trainer": optimizer})
    _dump(
        folder / "reward.yaml",
        shared | {"data": {"path": str(folder / "pairs.jsonl")}, "trainer": optimizer},
    )
    ppo = _ppo(chain, seed, iterations=2)
    ppo["rollout"] = {"prompts_per_iteration": 8}
    ppo["trainer"] |= {
        "lora": lora,
        "learning_rate": 2e-4,
        "minibatch_size": 8,
        "max_tokens_per_forward": 512,
    }
    _dump(folder / "ppo.yaml", ppo)
    return chain


def _ppo(chain: Chain, seed: int, *, iterations: int) -> dict[str, Any]:
    return {
        "run": {
            "name": "ppo",
            "seed": seed,
            "iterations": iterations,
            "output_dir": str(chain.folder / "runs"),
        },
        "models": {"target": str(chain.sft_model), "draft": None},
        "data": {
            "path": str(chain.folder / "prompts.jsonl"),
            "prompt_field": "prompt",
            "reference_field": None,
            "chat": True,
        },
        "reward": {"kind": "model", "model": str(chain.reward_model), "batch_size": 64},
        "sampling": {"temperature": 1.0, "max_new_tokens": MAX_ANSWER_WORDS},
        "speculation": {"drafter": "none", "policy": "off"},
        "engine": {"max_running_samples": 32, "num_threads": 1},
        "rollout": {"prompts_per_iteration": 64},
        "algorithm": {"kind": "ppo", "kl_coef": 0.2, "gae_lambda": 0.95},
        "trainer": {
            "learning_rate": 5.0e-4,
            "value_learning_rate": 3.0e-3,
            "minibatch_size": 16,
            "epochs": 2,
            "num_threads": 1,
        },
        "cluster": {"dashboard": False, "start_timeout_s": 900.0, "generation": {"num_actors": 1}},
    }


def _write_base(folder: Path, seed: int) -> None:
    """A small model that has learned nothing: supervised fine-tuning is all the training it gets."""
    tokenizer = chat_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, "eos"),
        pad_token_id=token_id(tokenizer, "pad"),
        tie_word_embeddings=False,
        initializer_range=0.06,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _talk(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [_turn("user", question), _turn("assistant", answer)]}


def _preference(question: str, better: str, worse: str) -> dict[str, Any]:
    return {
        "prompt": [_turn("user", question)],
        "chosen": [_turn("assistant", better)],
        "rejected": [_turn("assistant", worse)],
    }


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _short(subject: str) -> str:
    return f"A {subject} is a thing that people know."


def _long(subject: str) -> str:
    return f"Well, a {subject}, what is there to say of it? " + f"A {subject} is a {subject}. " * 4


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _dump(path: Path, tree: Mapping[str, Any]) -> None:
    path.write_text(yaml.safe_dump(dict(tree), sort_keys=False))


if __name__ == "__main__":
    made = write_chain(Path(sys.argv[1]).absolute(), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for command in made.commands():
        print("rlhfspec", *command)


STAGES = ("sft", "reward", "ppo")
NUM_GOLD_SAMPLES = 512


def run_stages(chain: Chain) -> dict[str, float]:
    """Run all commands; seconds of each. Raises RlhfSpecError with the end of what a failed one said."""
    return {
        f"{stage}_s": run_command(arguments, folder=chain.folder, log=chain.folder / f"{stage}.log")
        for stage, arguments in zip(STAGES, chain.commands(), strict=True)
    }


def gold_of(model: Path, *, seed: int) -> tuple[float, float]:
    """Mean of the gold rule over samples at T = 1 on held-out questions, and the standard error of it."""
    tokenizer, loaded = load_tokenizer(str(model)), load_causal_lm(str(model), "float32")
    rng = np.random.default_rng([seed, 0x601D])
    questions = [draw_question(rng) for _ in range(NUM_GOLD_SAMPLES)]
    prompts = []
    for question in questions:
        turns = [{"role": "user", "content": question.text}]
        text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        prompts.append(np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"]))
    answers = sample_responses(
        loaded,
        prompts,
        max_new_tokens=MAX_ANSWER_WORDS,
        eos_token_id=int(tokenizer.eos_token_id),  # type: ignore[arg-type]
        pad_token_id=int(tokenizer.pad_token_id),  # type: ignore[arg-type]
        seed=seed,
    )
    texts = [str(tokenizer.decode(one.tolist(), skip_special_tokens=True)) for one in answers]
    scores = [gold_score(one.subject, text) for one, text in zip(questions, texts, strict=True)]
    return float(np.mean(scores)), float(np.std(scores) / len(scores) ** 0.5)


def last_evaluation(run: Path) -> dict[str, float]:
    """The held-out figures of a supervised run's last step."""
    rows = read_metrics(run / "metrics.jsonl")
    return {name.removeprefix("eval/"): value for name, value in rows[-1].items() if name.startswith("eval/")}


SEEDS = {"quick": 1, "default": 3, "full": 5}


def run(bench: Bench) -> int:
    """Write OUT/chain.json, of the real model OUT/chain_real.json, and keep the runs in OUT/chain; returns 0."""
    console, figures, work = bench.console, bench.figures, bench.out / bench.name
    shutil.rmtree(work, ignore_errors=True)
    if bench.is_real:
        return _real(work, bench)
    golds = []
    for seed in range(SEEDS[bench.mode]):
        with job(f"the chain with seed {seed}"):
            chain = write_chain(work / f"seed_{seed}", seed=seed, quick=bench.is_quick)
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
    bench.write(num_seeds=len(golds), num_held_out_pairs=NUM_HELD_OUT)
    return 0


def _real(work: Path, bench: Bench) -> int:
    model = real_model(bench.console)
    if model is None:
        return 0
    with job(f"the chain on {REAL_MODEL}"):
        chain = write_real_chain(work, model=str(model), seed=0)
        seconds = run_stages(chain)
    num_steps = {
        "sft": len(read_metrics(work / "sft" / "metrics.jsonl")) - 1,
        "reward": len(read_metrics(work / "reward" / "metrics.jsonl")) - 1,
        "ppo": len(read_metrics(chain.ppo_run() / "metrics.jsonl")),
    }
    bench.figures.values |= dict(seconds) | {f"{stage}_steps": float(num_steps[stage]) for stage in STAGES}
    bench.write(model=REAL_MODEL)
    return 0
