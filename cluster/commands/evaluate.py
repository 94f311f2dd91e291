"""`rlhfspec eval`: evaluate one model or several on a file of prompts, without training."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.commands.arguments import out_folder, path_argument

if TYPE_CHECKING:
    from cluster.evaluate_models import ModelResult
    from cluster.reporting.console import Reporter

_TEXT = """\
Generate and score a model's responses to a file of prompts, as evaluations within a run do. Several are compared.

  rlhfspec eval --model runs/a/checkpoints/best --data test.jsonl --reward gsm8k
  rlhfspec eval --model base runs/a/checkpoints/target --config configs/gsm8k_ppo.yaml --data test.jsonl \\
      --samples-per-prompt 8 --temperature 0.7 --out results
"""


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "eval",
        help="evaluate a model on a file of prompts",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", nargs="+", required=True, metavar="MODEL", help="folder or name; several are compared"
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="prompts, all rows: JSONL, Parquet or a data set's name; by default what the config's run evaluates "
        "on, else its data",
    )
    parser.add_argument(
        "--config", type=path_argument, metavar="FILE", help="a run's config: its data, reward, cluster"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key; may be repeated"
    )
    parser.add_argument(
        "--reward", metavar="KIND", help="reward.kind, such as gsm8k or package.module:function"
    )
    parser.add_argument(
        "--samples-per-prompt", type=int, metavar="K", help="k of mean@k and pass@k; 1 by default"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0, the default, is greedy")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="longest response")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first prompts")
    parser.add_argument(
        "--out", type=path_argument, metavar="DIR", help="write results.json and the samples there"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate one model after the other, print a table. Raises InputError for bad input."""
    from cluster.reporting.console import Reporter
    from core.config_io import read_tree

    report = Reporter()
    out = out_folder(args.out) if args.out is not None else None
    tree = read_tree(args.config) if args.config is not None else {}
    if args.reward is not None:
        tree["reward"] = {**(tree.get("reward") or {}), "kind": args.reward}
    wishes = {
        "samples_per_prompt": args.samples_per_prompt,
        "temperature": args.temperature,
        "max_new_tokens": args.max_new_tokens,
        "limit": args.limit,
    }
    sampling = {key: value for key, value in wishes.items() if value is not None}
    try:
        return _run(args, tree, sampling, out, report)
    finally:
        report.stop()


def _run(
    args: argparse.Namespace,
    tree: dict[str, Any],
    sampling: dict[str, Any],
    out: Path | None,
    report: Reporter,
) -> int:
    report.stage("loading torch and transformers")
    from cluster.evaluate_models import evaluate_model, evaluation_config, write_results
    from cluster.preflight.named_models import resolve_models
    from cluster.run_folder.run_time import with_time

    now = datetime.now()
    configs = [
        with_time(
            resolve_models(
                evaluation_config(tree, model=model, data=args.data, overrides=args.set, sampling=sampling),
                report,
            ),
            now,
        )
        for model in args.model
    ]
    results = []
    for name, config in zip(args.model, configs, strict=True):
        report.stage(f"evaluating {name}")
        results.append(evaluate_model(config, report))
    report.stop()
    _print(args.model, results, report)
    if out is not None:
        write_results(out, results, configs[0])
        report.note(f"results in {out}")
    return 0


def _print(names: list[str], results: list[ModelResult], report: Reporter) -> None:
    from rich.table import Table

    table = Table(title="evaluation", title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for figure in dict.fromkeys(name for one in results for name in one.figures):
        values = [f"{one.figures[figure]:.4g}" if figure in one.figures else "-" for one in results]
        table.add_row(figure.removeprefix("eval/"), *values)
    table.add_row("seconds", *(f"{one.seconds:.1f}" for one in results))
    report.console.print(table)
