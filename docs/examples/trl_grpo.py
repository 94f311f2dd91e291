"""GRPO by TRL, its rollouts by our engine. On a CPU: python docs/examples/trl_grpo.py [MODEL [DRAFT]]."""

import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rlhfspec.integrations.trl import rollout_func

model = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
draft = sys.argv[2] if len(sys.argv) > 2 else None
questions = ["Name a colour.", "Name an animal.", "Name a country.", "Name a fruit."]


def is_short(completions, **_):
    """The reward: 1 for one character, less for each further one."""
    return [1.0 / max(len(completion[0]["content"]), 1) for completion in completions]


trainer = GRPOTrainer(
    model=model,
    reward_funcs=is_short,
    train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": one}] for one in questions]}),
    args=GRPOConfig(
        output_dir="trl-grpo",
        max_steps=3,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=32,
        learning_rate=1e-5,
        bf16=False,  # float32: the engine's log-probabilities are then TRL's own
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    ),
    rollout_func=rollout_func(draft),  # the one line that is new
)
trainer.train()
