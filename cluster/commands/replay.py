"""`rlhfspec replay`: whether a step log's decisions come out again, and how one sample came about."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.commands.arguments import path_argument

if TYPE_CHECKING:
    from core.decode_records import StepRecord
    from policies.drafting.replay import Difference

_TEXT = """\
Feed a step log to a fresh draft policy and compare every decision; name the first that differs.
A run with run.step_log true writes the logs, a folder an instance, a file an iteration.

  rlhfspec replay runs/RUN/steps/gen-0    all iterations of an instance
  rlhfspec replay runs/RUN/steps/gen-0/iteration_0000.parquet

With --sample, print one sample of a run: prompt, response, reward, who generated it with which weights, and each decode
step of generating it again: what was drafted, what was accepted. It is alone then, so other steps than in the run; its
tokens and log-probabilities are the same.

  rlhfspec replay runs/RUN --sample 17

Exit codes: 0 every decision, or the sample, is the same, 1 something differs, 2 nothing that can be replayed.
"""


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "replay",
        help="check a step log's decisions, or look at one sample",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "log",
        type=path_argument,
        metavar="FILE",
        help="a step log, or a folder of its files; with --sample a run folder",
    )
    parser.add_argument("--sample", type=int, metavar="N", help="the sample with this index")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay, print one line. Raises DataError for what cannot be replayed."""
    if args.sample is not None:
        return _replay_sample(args.log, args.sample)
    from engine.draft_policies import build_policy
    from policies.drafting.replay import replay
    from profiles.step_log import read_step_log

    records, origin = read_step_log(args.log)
    _require_whole(records, args.log)
    difference = replay(build_policy(origin.speculation, origin.profile), records)
    if difference is None:
        print(
            f"{len(records)} decode steps of policy {origin.speculation.policy}: every decision comes out again"
        )
        return 0
    print(_describe(difference))
    return 1


def _replay_sample(run_dir: Path, index: int) -> int:
    from cluster.reporting.console import Reporter

    report = Reporter()
    report.stage("loading torch and transformers")
    from cluster.proof.choice import run_config
    from cluster.proof.replay_sample import replay_sample
    from cluster.proof.sample_text import sample_lines

    try:
        config = run_config(run_dir)
        replayed = replay_sample(run_dir.absolute(), config, index)
    finally:
        report.stop()
    for line in sample_lines(replayed):
        print(line)
    return 1 if replayed.differences else 0


def _require_whole(records: list[StepRecord], path: Path) -> None:
    """Raise DataError for a log that a fresh policy cannot follow: it decides by all steps before."""
    from core.errors import DataError

    if not records:
        raise DataError(f"{path} holds no decode step")
    for number, record in enumerate(records):
        if record.decode_step != number:
            what = "begins with" if number == 0 else f"goes from decode step {number - 1} to"
            raise DataError(
                f"{path} {what} decode step {record.decode_step}, expected {number}: a policy decides by all steps "
                "before; give the instance's folder, with the files of all iterations"
            )


def _describe(difference: Difference) -> str:
    return (
        f"decode step {difference.decode_step} differs: {difference.what} is {difference.recorded} in the log, "
        f"{difference.replayed} in the replay"
    )
