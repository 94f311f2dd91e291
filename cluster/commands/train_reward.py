"""`rlhfspec train-reward`: a reward model from pairs of responses of which one is better."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.commands.arguments import add_supervised_arguments, run_supervised

_TEXT = """\
Train a reward model: rows with `prompt`, `chosen` and `rejected` (text, or lists of messages), or `chosen` and
`rejected` conversations that begin alike; a `margin` where rows have one. JSONL or Parquet.

  rlhfspec train-reward --model sft/checkpoints/model --data pairs.jsonl --out reward
  rlhfspec train --config FILE --set reward.kind=model --set reward.model=reward/checkpoints/model

A causal language model gets a new head with one output. Accuracy and margin are of held-out pairs.
"""


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "train-reward",
        help="train a reward model from preference pairs",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_supervised_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train. Raises InputError for bad input."""
    from core.settings.supervised import TrainRewardConfig

    return run_supervised(TrainRewardConfig, args)
