"""`rlhfspec models make`: a tokenizer, a target and a draft model from text, without GPU or hub."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.commands.arguments import budget_argument, out_folder, path_argument

_TEXT = """\
Make a pair of models for RLHF from any text, or from question/answer JSONL.

  rlhfspec models make --data train.jsonl --out pair
  rlhfspec train --config configs/gsm8k_ppo.yaml --set data.path=train.jsonl \\
      --set models.target=pair/target --set models.draft=pair/draft
"""


def add_parser(commands: Any) -> None:
    """Describe the command and its one action."""
    parser = commands.add_parser(
        "models",
        help="make a model pair of your own (models make)",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    make = actions.add_parser(
        "make",
        help="make tokenizer, target and draft from text",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    make.add_argument(
        "--data",
        type=path_argument,
        nargs="+",
        required=True,
        metavar="FILE",
        help=".jsonl with both fields, or text",
    )
    make.add_argument(
        "--out", type=path_argument, required=True, metavar="DIR", help="gets target/ and draft/"
    )
    make.add_argument("--prompt-field", default="question", help="JSONL field of the prompt (%(default)s)")
    make.add_argument("--answer-field", default="answer", help="JSONL field of the answer (%(default)s)")
    make.add_argument(
        "--budget",
        type=budget_argument,
        default=180.0,
        metavar="SECONDS",
        help="about how long to train (%(default)g)",
    )
    make.add_argument("--seed", type=int, default=0, help="seed of weights and batches (%(default)s)")
    make.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the pair. Raises DataError for files that cannot be read."""
    from cluster.reporting.console import Reporter
    from learning.pairs.make import make_pair_from_text

    out = out_folder(args.out)
    report = Reporter()
    with report.job("making the pair") as tick:
        pair = make_pair_from_text(
            args.data,
            out,
            prompt_field=args.prompt_field,
            answer_field=args.answer_field,
            budget_s=args.budget,
            seed=args.seed,
            progress=tick,
        )
    report.note(f"target {pair.target}\ndraft  {pair.draft}")
    return 0
