"""`rlhfspec sft`: supervised fine-tuning from a file of conversations or prompts with completions."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.commands.arguments import add_supervised_arguments, run_supervised

_TEXT = """\
Supervised fine-tuning: rows with `messages` (loss on the assistant's turns), or with `prompt` and `completion` (text,
or lists of messages), JSONL or Parquet.

  rlhfspec sft --model smollm2-135m-instruct --data train.jsonl --out sft
  rlhfspec sft --model BASE --data gsm8k.jsonl --out sft --set data.prompt_field=question \\
      --set data.reference_field=answer --set trainer.lora.rank=16 --set trainer.learning_rate=2e-4
  rlhfspec sft --resume sft                       goes on from its last state (trainer.checkpoint_every)

The checkpoint is OUT/checkpoints/model, which models.target, --model and train-reward take.
"""


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "sft",
        help="supervised fine-tuning from a file",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_supervised_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train. Raises InputError for bad input."""
    from core.settings.supervised import SftConfig

    return run_supervised(SftConfig, args)
