"""Three GRPO steps by TRL itself, the release on the path: python trl_run.py PAIR EXAMPLE; prints one line of JSON.

Of each step: the responses and log-probabilities that TRL got, those of our engine alone with the trainer's weights,
and the largest difference from TRL's own forward. Then a step with an environment, and the example as a user starts it.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from copy import deepcopy
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from rlhfspec.core.config import EngineConfig, EnvironmentConfig, SpeculationConfig
from rlhfspec.core.records import Prompt, SampleKey, SampleRequest, SamplingParams
from rlhfspec.engine.build import build_engine
from rlhfspec.integrations.trl import rollout_func

SEED, NEW_TOKENS, TEMPERATURE = 5, 12, 0.9


def alone(trainer: Any, prompt_ids: list[list[int]]) -> dict[str, list[list[float]]]:
    """Plain decoding with the weights that the trainer has now."""
    model = deepcopy(trainer.accelerator.unwrap_model(trainer.model)).eval()
    plain = SpeculationConfig(policy="off")
    engine = build_engine(model, None, engine=EngineConfig(), speculation=plain, max_total_tokens=128)
    eos = trainer.processing_class.eos_token_id
    sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=NEW_TOKENS, stop_token_ids=(eos,))
    first = trainer.state.global_step << 32
    with torch.no_grad():
        done = engine.generate(
            SampleRequest(
                key=SampleKey(run_seed=SEED, sample_index=first + number),
                prompt=Prompt(prompt_id=0, token_ids=np.array(ids)),
                sampling=sampling,
            )
            for number, ids in enumerate(prompt_ids)
        )
    return {
        "completion_ids": [one.token_ids.tolist() for one in done],
        "logprobs": [one.policy_logprobs.tolist() for one in done],
    }


def furthest(trainer: Any, got: dict[str, list[Any]]) -> float:
    """The largest difference from the log-probabilities of TRL's forward."""
    differences = []
    for prompt, response, logprobs in zip(
        got["prompt_ids"], got["completion_ids"], got["logprobs"], strict=True
    ):
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            theirs = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, torch.ones_like(ids), len(response)
            )[0]
        differences.append(float((theirs[0] - torch.tensor(logprobs)).abs().max()))
    return max(differences)


def main(pair: str, example: str) -> None:
    """Train, then run the example."""
    tried = SpeculationConfig(policy="bandit")
    ours, steps = rollout_func(f"{pair}/draft", speculation=tried), []

    def checked(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        got = ours(prompts, trainer)
        plain = alone(trainer, got["prompt_ids"])
        steps.append(
            {
                "step": trainer.state.global_step,
                "templated_alike": got["prompt_ids"] == trainer._tokenize_prompts(prompts)[0],
                "equal": all(got[name] == plain[name] for name in plain),
                "difference": furthest(trainer, got),
                "logprobs": got["logprobs"],
                "completion_ids": got["completion_ids"],
            }
        )
        return got

    train(
        pair,
        checked,
        lambda completions, **_: [float(len(one[0]["content"])) for one in completions],
        steps=3,
    )
    rewards: list[float] = []

    def kept(environment_reward: list[float], **_: Any) -> list[float]:
        rewards.extend(environment_reward)
        return environment_reward

    parrot = EnvironmentConfig(
        kind="sample_environments:Parrot", options={"turns": 2, "longest": 1}, max_turn_tokens=3
    )
    answered = train(
        pair,
        rollout_func(speculation=tried.model_copy(update={"drafter": "suffix"}), environment=parrot),
        kept,
        steps=1,
    )
    sys.argv = [example, f"{pair}/target", f"{pair}/draft"]
    losses = [row["loss"] for row in runpy.run_path(example)["trainer"].state.log_history if "loss" in row]
    found = {"rewards": rewards, "mean_length": answered.state.log_history[0]["completions/mean_length"]}
    print(json.dumps({"release": version("trl"), "steps": steps, "example_losses": losses, **found}))


def train(pair: str, rollouts: Callable[..., Any], reward: Callable[..., list[float]], *, steps: int) -> Any:
    """Some steps of GRPO; the trainer."""
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(f"{pair}/target"),
        processing_class=AutoTokenizer.from_pretrained(f"{pair}/target"),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "Go on."}]] * 4}),
        args=GRPOConfig(
            output_dir="out",
            max_steps=steps,
            logging_steps=1,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=NEW_TOKENS,
            temperature=TEMPERATURE,
            learning_rate=0.01,
            seed=SEED,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
        ),
        rollout_func=rollouts,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
