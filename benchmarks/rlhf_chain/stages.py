"""Runs the chain's commands as a user does, and reads what they left."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.rlhf_chain.task_files import Chain
from benchmarks.support.processes import run_command
from rlhfspec.core.metrics import read_metrics
from rlhfspec.engine.weights.loading import load_causal_lm, load_tokenizer
from rlhfspec.learning.models.demo_pair import sample_responses
from rlhfspec.learning.tasks.preference_task import MAX_ANSWER_WORDS, draw_question, gold_score

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
