"""`rlhfspec rescore` and `fork`: what the rollouts of an earlier run are good for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from .arguments import COUNT, set_flag
from .declare import Arg


def _iterations(flag: str, text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(COUNT(flag, first)), int(COUNT(flag, last or first))


def rescore(
    run_dir: Annotated[Path, Arg("RUN", "folder that the run printed first")],
    *,
    reward: Annotated[
        str,
        Arg(
            "KIND", "as reward.kind, such as path/to/file.py:function; nothing else of the run's reward stays"
        ),
    ]
    | None = None,
    overrides: Annotated[list[str], set_flag("change a key of the run's config, such as reward.std=2")],
    iterations: Annotated[
        tuple[int, int],
        Arg("A-B", "score these alone, or the one iteration A; they count from 1", parse=_iterations),
    ]
    | None = None,
    out: Annotated[
        Path, Arg("FILE", "write keys, rewards and advantages of all samples, as .parquet or .jsonl")
    ]
    | None = None,
) -> int:
    """Score a run's samples with another reward.

    Score recorded samples again, generate nothing, and print old and new rewards side by side: means, correlation,
    the order within groups, groups that begin or cease to have advantages, the samples that changed most.

      rlhfspec rescore runs/RUN --reward rewards.py:mended
      rlhfspec rescore runs/RUN --set reward.shaping.length_penalty=0.01 --iterations 1-5 --out rescored.parquet

    To learn from it: rlhfspec fork RUN --at 0 --set reward.kind=rewards.py:mended
    """  # fmt: skip
    from ...core.errors import ConfigError
    from ..observe.console import Reporter

    if out is not None and out.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(
            f"--out {out}: expected a file .parquet or .jsonl, got '{out.suffix}'; name another"
        )
    if reward is None and not overrides:
        raise ConfigError(
            "expected another reward, got none; name it by --reward KIND, or by --set reward.KEY=..."
        )
    chosen = [] if reward is None else [f"reward={json.dumps({'kind': reward})}"]
    with Reporter() as report:
        report.stage("loading torch and transformers")
        from ..verify.choice import RecordedRun
        from ..verify.rescored_run import rescore_run

        # nothing is evaluated: its metric may be of a part that this reward has not
        run = RecordedRun.open(run_dir, ["evaluation.every=0", *chosen, *overrides])
        with report.job("rescore") as tick:
            done = rescore_run(run, iterations=iterations, tick=tick)
        if out is not None:
            done.write(out)
    for line in done.lines():
        report.note(line)
    return 0
