"""`rlhfspec drafter make | eval`: a draft head for any target, made from prompts; what its drafts are worth."""

from __future__ import annotations

import argparse
import math
from typing import Any

from cluster.commands.arguments import budget_argument, out_folder, path_argument, seed_argument
from core.errors import ConfigError

_ABOUT = """\
Make a draft head (EAGLE-3's form) for a target, and say how its drafts are accepted.

  rlhfspec drafter make --target smollm2-135m-instruct --data train.jsonl --out head
  rlhfspec drafter eval --target smollm2-135m-instruct --drafter head --data test.jsonl
"""

_MAKE = """\
Make a draft head for a target from prompts alone: the target answers them, the head learns from its hidden states.

  rlhfspec drafter make --target smollm2-135m-instruct --data train.jsonl --out head
  rlhfspec drafter make --target DIR --data prompts.jsonl --set data.prompt_field=prompt --out head --budget 1800

The folder has the files and names of EAGLE-3 heads as SpecForge writes them: SGLang and vLLM load it.
"""

_EVAL = """\
Let the target answer prompts and count how a head's drafts would be accepted: by level, by position in the response,
by category, and as tokens a decode step. Heads of SpecForge and EAGLE are read too,
from safetensors in one file.

  rlhfspec drafter eval --target smollm2-135m-instruct --drafter head --data test.jsonl
  rlhfspec drafter eval --target DIR --drafter head --data bench.jsonl --category-field task
"""


def add_parser(commands: Any) -> None:
    """Describe the command and its two actions."""
    parser = commands.add_parser(
        "drafter",
        help="make a draft head for a target, or evaluate one (drafter make, drafter eval)",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    make = _action(actions, "make", "make a draft head from prompts", _MAKE, make_head)
    make.add_argument("--out", type=path_argument, required=True, metavar="DIR", help="gets the head, new")
    make.add_argument(
        "--budget",
        type=budget_argument,
        default=900.0,
        metavar="SECONDS",
        help="how long at most (%(default)g)",
    )
    make.add_argument(
        "--temperature", type=_temperature, default=1.0, metavar="T", help="of the run that it drafts for (1)"
    )
    make.add_argument(
        "--tokens",
        type=_count("--tokens"),
        default=36_000,
        metavar="N",
        help="own tokens to learn from (%(default)s)",
    )
    make.add_argument(
        "--draft-vocab",
        type=_count("--draft-vocab"),
        default=8192,
        metavar="D",
        help="token ids that it drafts (%(default)s)",
    )
    make.add_argument(
        "--threads",
        type=_count("--threads"),
        default=1,
        metavar="N",
        help="of torch, for training (%(default)s)",
    )
    evaluate = _action(actions, "eval", "how a head's drafts are accepted", _EVAL, evaluate_head)
    evaluate.add_argument(
        "--drafter", type=path_argument, required=True, metavar="DIR", help="folder of the head"
    )
    evaluate.add_argument(
        "--temperature",
        type=_temperature,
        nargs="+",
        default=[1.0, 0.6],
        metavar="T",
        help="one or several (1 and 0.6)",
    )
    evaluate.add_argument(
        "--limit",
        type=_count("--limit"),
        default=32,
        metavar="N",
        help="use only the first prompts (%(default)s)",
    )
    evaluate.add_argument(
        "--depth", type=_count("--depth"), default=6, metavar="K", help="levels drafted (%(default)s)"
    )
    evaluate.add_argument(
        "--category-field", metavar="FIELD", help="field of the data that says a prompt's category"
    )


def make_head(args: argparse.Namespace) -> int:
    """Make it. Raises InputError for bad input."""
    out = out_folder(args.out)
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"--out {out} is not empty; expected a new folder; remove it or name another")
    # what takes seconds to load comes after what may be mistyped
    from cluster.drafter_jobs import make_drafter
    from learning.heads.make_head import HeadRecipe

    report, inputs = _inputs(args)
    make_drafter(
        inputs,
        report,
        out=out,
        budget_s=args.budget,
        temperature=args.temperature,
        max_new_tokens=args.max_new_tokens,
        recipe=HeadRecipe(
            num_tokens=args.tokens, draft_vocab_size=args.draft_vocab, num_threads=args.threads
        ),
        seed=args.seed,
    )
    return 0


def evaluate_head(args: argparse.Namespace) -> int:
    """Evaluate it. Raises InputError for bad input."""
    if not args.drafter.is_dir():
        got = "is a file" if args.drafter.exists() else "does not exist"
        raise ConfigError(f"--drafter expects the folder of a draft head, {args.drafter} {got}")
    from cluster.drafter_jobs import evaluate_drafter

    report, inputs = _inputs(args, category_field=args.category_field)
    del inputs.prompts[args.limit :]
    evaluate_drafter(
        inputs,
        report,
        folder=args.drafter,
        temperatures=args.temperature,
        max_new_tokens=args.max_new_tokens,
        num_levels=args.depth,
        seed=args.seed,
        category_field=args.category_field,
    )
    return 0


def _inputs(args: argparse.Namespace, category_field: str | None = None) -> tuple[Any, Any]:
    from cluster.drafter_jobs import read_inputs
    from cluster.reporting.console import Reporter

    report = Reporter()
    try:
        inputs = read_inputs(
            report,
            target=args.target,
            data=args.data,
            overrides=args.set,
            max_new_tokens=args.max_new_tokens,
            category_field=category_field,
        )
    finally:
        report.stop()
    return report, inputs


def _action(actions: Any, name: str, summary: str, text: str, run: Any) -> argparse.ArgumentParser:
    parser = actions.add_parser(
        name, help=summary, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, metavar="MODEL", help="folder or name of the target")
    parser.add_argument(
        "--data", required=True, metavar="FILE", help="prompts: JSONL, Parquet or a data set's name"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of a run's config, such as data.prompt_field=prompt; may be repeated",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=_count("--max-new-tokens"),
        default=256,
        metavar="N",
        help="longest response (%(default)s)",
    )
    parser.add_argument(
        "--seed", type=seed_argument, default=0, help="of responses and training (%(default)s)"
    )
    parser.set_defaults(run=run)
    return parser


def _count(name: str) -> Any:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{name} expects a whole number above 0, got {text}")
        return int(text)

    return count


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"--temperature expects a number of 0 or more, got {text}")
    return value
