"""`rlhfspec profile`: measure what drafting and verifying cost here, and how drafts are accepted."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.commands.arguments import add_config_arguments, budget_argument, out_folder, path_argument

_TEXT = """\
Measure a profile of the configured pair on this machine: the time of decode steps over samples, context and tokens
verified; the acceptance of drafted tokens on the configured prompts. The policy `goodput` goes by it.

  rlhfspec profile --config configs/demo.yaml --out profile
  rlhfspec train --config configs/demo.yaml --set speculation.profile=profile

Without this, `speculation.profile: auto` measures one at the start of a run and keeps it in the cache.
"""


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "profile",
        help="measure costs and acceptance of a pair on this machine",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--out", type=path_argument, required=True, metavar="DIR", help="gets tables, models, pictures"
    )
    parser.add_argument(
        "--budget", type=budget_argument, default=75.0, metavar="SECONDS", help="about how long (%(default)g)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write, say how good the fit is. Raises InputError for bad input."""
    from cluster.preflight.inputs import read_inputs
    from cluster.preflight.named_models import resolve_models
    from cluster.preflight.run_profile import describe, measure
    from cluster.reporting.console import Reporter
    from cluster.reporting.profile_picture import draw_profile
    from core.config_io import load_config
    from profiles.profile import save_profile

    report = Reporter()
    out = out_folder(args.out)
    try:
        report.stage("loading torch and transformers")
        config = resolve_models(load_config(args.config, args.set), report)
        inputs = read_inputs(config)
        config = inputs.ending(config)
        described = describe(config, inputs)
        report.stop()
        made = measure(config, inputs, described, report, budget_s=args.budget)
    finally:
        report.stop()
    save_profile(made.profile, out, made.costs, made.drafts)
    pictures = draw_profile(made, out)
    for name, value in made.profile.quality.items():
        report.note(f"{name:<45}{value:.4f}")
    report.note(f"profile {out}; pictures {', '.join(path.name for path in pictures)}")
    return 0
