"""`rlhfspec rescore`, `pairs` and `fork`: what the rollouts of an earlier run are good for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from .arguments import COUNT, Overrides, RunFolder, number, set_flag
from .declare import Arg
from .train import DryRun, run_prepared, tell_plan


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
    from ..observe.console import START_UP_STAGES, Reporter

    if out is not None and out.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(
            f"--out {out}: expected a file .parquet or .jsonl, got '{out.suffix}'; name another"
        )
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: expected a folder that is there, got {out.parent}; make it first")
    if reward is None and not overrides:
        raise ConfigError(
            "expected another reward, got none; name it by --reward KIND, or by --set reward.KEY=..."
        )
    chosen = [] if reward is None else [f"reward={json.dumps({'kind': reward})}"]
    with Reporter() as report:
        report.stage(START_UP_STAGES["imports"])
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


def pairs(
    run_dir: Annotated[Path, Arg("RUN", "folder that the run printed first")],
    *,
    out: Annotated[Path, Arg("FILE", "the rows, as .jsonl")],
    reward: Annotated[
        str, Arg("KIND", "rank by this reward, as of rescore, in the place of the recorded one")
    ]
    | None = None,
    overrides: Annotated[list[str], set_flag("rank by the run's reward with a changed key, as of rescore")],
    iterations: Annotated[tuple[int, int], Arg("A-B", "of these alone, as of rescore", parse=_iterations)]
    | None = None,
    sample: Annotated[
        int, Arg("N", "sample the run's prompts anew, N times each, and rank these", parse=COUNT)
    ]
    | None = None,
    version: Annotated[int, Arg("V", "with --sample: from this kept weight version; the last by default")]
    | None = None,
    limit: Annotated[int, Arg("N", "with --sample: only the first prompts", parse=COUNT)] | None = None,
) -> int:
    """Make preference pairs of a run's samples.

    Of each group of recorded samples the best and the worst by their reward, as rows that dpo and train-reward read.
    Cut samples and groups without a difference are left out and counted; nothing is generated; equal runs give equal
    bytes. With --sample the run's training prompts are sampled anew, under keys of evaluations: equal bytes again.

      rlhfspec pairs runs/RUN --out pairs.jsonl
      rlhfspec pairs runs/RUN --reward rewards.py:mended --iterations 1-5 --out pairs.jsonl
      rlhfspec pairs runs/RUN --sample 8 --set run.seed=7 --out pairs.jsonl
      rlhfspec dpo --model MODEL --data pairs.jsonl --out dpo
    """
    from ...core.errors import ConfigError
    from ..observe.console import START_UP_STAGES, Reporter

    if out.suffix != ".jsonl" or not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: expected a file .jsonl in a folder that is there; name another")
    is_mixed = iterations is not None if sample is not None else (version, limit) != (None, None)
    if is_mixed or sample == 1:
        raise ConfigError(
            "--sample N takes 2 samples of a prompt or more and no --iterations; --version and --limit are of --sample"
        )
    chosen = [] if reward is None else [f"reward={json.dumps({'kind': reward})}"]
    with Reporter() as report:
        report.stage(START_UP_STAGES["imports"])
        from ..verify.choice import RecordedRun
        from ..verify.preference_pairs import pairs_of, pairs_of_run

        if sample is not None:
            from ..jobs.evaluate_models import evaluate_model, plan_sampling
            from ..verify.kept_weights import kept_version

            run = RecordedRun.open(run_dir, [*chosen, *overrides])
            version, model = kept_version(run.folder, run.config.models.target, version)
            plan = plan_sampling(run, model, samples_per_prompt=sample, limit=limit)
            report.note(f"weight version {version} of {run.folder}")
            rollouts = evaluate_model(plan, report).rollouts
            origin = f"weight version {version} of {run.folder}"
            done = pairs_of(((one, one.reward) for one in rollouts), plan.inputs.tokenizer, origin=origin)
        else:
            run = RecordedRun.open(run_dir, ["evaluation.every=0", *chosen, *overrides])
            with report.job("pairs") as tick:
                again = bool(chosen or overrides)
                done = pairs_of_run(run, iterations=iterations, scores_again=again, tick=tick)
        done.write(out)
    for line in done.lines():
        report.note(line)
    return 0


def fork(
    run_dir: Annotated[Path, Arg("RUN", "folder that the run printed first, which is only read")],
    *,
    at: Annotated[
        int,
        Arg(
            "N",
            "go on from the run's state after N iterations; 0: begin anew with its config",
            parse=number("a whole number from 0 on", int, lambda value: value >= 0),
        ),
    ],
    overrides: Overrides,
    out: RunFolder | None = None,
    dry_run: DryRun = False,
) -> int:
    """Go on from a run's state with other settings, as a new run.

    Begin a new run from a state of another, with changed keys: reward, algorithm, learning rate, whatever leaves keys
    and prompts as they are. Responses of RUN are taken over while weights are equal, and are drafts from there on
    (rollout.record). `rlhfspec report` shows both.

      rlhfspec fork runs/RUN --at 10 --set trainer.learning_rate=1.0e-6
      rlhfspec fork runs/RUN --at 0 --set reward.kind=rewards.py:mended
    """
    from ..observe.console import Reporter
    from ..run.prepared_run import prepare_run

    with Reporter() as report:
        prepared = prepare_run(None, overrides, report, out=out, fork=(run_dir, at), dry_run=dry_run)
        if dry_run:
            tell_plan(prepared.plan, report)
        else:
            run_prepared(prepared, report)
    return 0
