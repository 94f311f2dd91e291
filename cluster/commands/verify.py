"""`rlhfspec verify`: prove a run from its folder, bit for bit."""

from __future__ import annotations

import argparse
import secrets
from typing import TYPE_CHECKING, Any

from cluster.commands.arguments import path_argument, seed_argument
from core.errors import ConfigError

if TYPE_CHECKING:
    from cluster.proof.proof_record import Proof

_TEXT = """\
Generate a random share of a run's samples again, from weights, prompt and key, and compare tokens, log-probabilities,
finish reasons, rewards and checkpoints with the run folder, bit for bit. Whatever differs is named.

  rlhfspec verify runs/RUN                 2% of what can be verified
  rlhfspec verify runs/RUN --share 1       everything

Samples can be generated again where their weights are kept: run.checkpoint_every=1 keeps every version.
Exit codes: 0 nothing differs, 1 something differs, or nothing at all could be verified, 2 no run folder.
"""
_MOST_DIFFERENCES = 20


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "verify",
        help="prove a run's samples, rewards and checkpoints",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run_dir", type=path_argument, metavar="RUN", help="folder that the run printed first"
    )
    parser.add_argument(
        "--share",
        type=float,
        default=0.02,
        metavar="S",
        help="of the samples, above 0, at most 1; 0.02 by default",
    )
    parser.add_argument(
        "--seed", type=seed_argument, metavar="N", help="draws the samples; a new one by default"
    )
    parser.add_argument(
        "--engines",
        type=int,
        metavar="N",
        help="that generate at once, each with a copy of the weights; by default one a core where memory has room",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the run's config for what is elsewhere by now, such as models.target=DIR",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify and print. Raises InputError: no run folder, or models that cannot be loaded."""
    if not 0.0 < args.share <= 1.0:
        raise ConfigError(f"--share expects a share above 0, at most 1, got {args.share}")
    if args.engines is not None and args.engines < 1:
        raise ConfigError(f"--engines expects at least 1, got {args.engines}")
    seed = secrets.randbelow(2**32) if args.seed is None else args.seed
    from cluster.reporting.console import Reporter

    report = Reporter()
    report.stage("loading torch and transformers")
    from cluster.proof.verify_run import verify_run

    try:
        with report.job("verify") as tick:
            proof = verify_run(
                args.run_dir,
                share=args.share,
                seed=seed,
                num_engines=args.engines,
                overrides=args.set,
                tick=tick,
            )
    finally:
        report.stop()
    for line in _lines(proof):
        report.note(line)
    return 0 if proof.holds else 1


def _lines(proof: Proof) -> list[str]:
    lines = [f"checkpoints: {proof.num_checkpoints} compared with their manifests"]
    lines.append(
        f"samples: {proof.num_regenerated} of {proof.num_recorded} generated again (seed {proof.seed}), "
        f"{proof.num_tokens:,} tokens, {proof.num_rewards} rewards computed again"
    )
    lines += [f"  not verified: {count} samples: {why}" for why, count in proof.unverified.items()]
    lines += [f"  {note}" for note in proof.notes]
    if proof.num_regenerated and proof.generated_s:
        ratio = proof.seconds / proof.generated_s
        lines.append(
            f"  {proof.seconds:.1f} s after a start of {proof.start_s:.1f} s; the run took {proof.generated_s:.1f} s "
            f"to generate them (x {ratio:.2f})"
        )
    shown = proof.differences[:_MOST_DIFFERENCES]
    lines += [f"DIFFERS {difference}" for difference in shown]
    if len(shown) < len(proof.differences):
        lines.append(f"... and {len(proof.differences) - len(shown)} more")
    if not proof.num_regenerated:
        lines.append("nothing was verified: no sample of this run could be generated again here")
    lines.append(f"{len(proof.differences)} differences")
    return lines
