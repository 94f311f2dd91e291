"""`rlhfspec verify`, `compare` and `replay`: prove a run from its folder, bit for bit; follow one sample or one log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .arguments import SEED, number, set_flag
from .declare import Arg

if TYPE_CHECKING:
    from ...core.decode_records import StepRecord
    from ..observe.console import Reporter
    from ..verify.verification import Verification

_MOST_DIFFERENCES = 20


def verify(
    run_dir: Annotated[Path, Arg("RUN", "folder that the run printed first")],
    *,
    share: Annotated[
        float,
        Arg(
            "S",
            "of the samples, above 0, at most 1; 0.02 by default",
            parse=number("a share above 0, at most 1", float, lambda value: 0.0 < value <= 1.0),
        ),
    ] = 0.02,
    seed: Annotated[int, Arg("N", "draws the samples; a new one by default", parse=SEED)] | None = None,
    engines: Annotated[
        int,
        Arg(
            "N",
            "that generate at once, each with a copy of the weights; by default one a core where memory has room",
            parse=number("at least 1", int, lambda value: value >= 1),
        ),
    ]
    | None = None,
    overrides: Annotated[
        list[str],
        set_flag(
            "override a key of the run's config for what is elsewhere by now, such as models.target=DIR"
        ),
    ],
) -> int:
    """Prove a run's samples, rewards and checkpoints.

    Generate a random share of a run's samples again, from weights, prompt and key, and compare tokens,
    log-probabilities, finish reasons, rewards and checkpoints with the run folder, bit for bit. Whatever differs is
    named.

      rlhfspec verify runs/RUN                 2% of what can be verified
      rlhfspec verify runs/RUN --share 1       everything

    Samples can be generated again where their weights are kept: run.checkpoint_every=1 keeps every version.
    Exit codes: 0 nothing differs, 1 something differs, nothing at all could be verified, or what the run says of its
    own outcome cannot be (all versions have one checksum, first ratios are off), 2 no run folder.
    """
    from ..observe.console import START_UP_STAGES, Reporter

    with Reporter() as report:
        report.stage(START_UP_STAGES["imports"])
        from ..verify.verify_run import verify_run

        with report.job("verify") as tick:
            verification = verify_run(
                run_dir,
                share=share,
                seed=int.from_bytes(os.urandom(4)) if seed is None else seed,
                num_engines=engines,
                overrides=overrides,
                tick=tick,
            )
    for line in _lines(verification):
        report.note(line)
    return 0 if verification.holds else 1


def compare(run_dir: Annotated[Path, Arg("RUN", "folder that the run printed first")]) -> int:
    """Measure what speculation and moves gave a run.

    Decode the last batch of a finished run once more, on as many instances with the same weights, without speculation
    and moves: every sample is bound to an instance in turn, as engines do that split a batch up front. Prints how much
    faster the run's own rollout and step were, and writes it into comparison.json, which `rlhfspec explain` reads.

      rlhfspec compare runs/demo-20260101-120000

    Responses are scored again, as in the run. The batch's weights must be kept: run.checkpoint_every=1 with
    run.keep_checkpoints=2 keeps those of the last.
    Exit codes: 0 all tokens are equal, 1 one differs, 2 nothing of this run can be compared.
    """
    from ..observe.console import Reporter

    with Reporter() as report:
        compare_and_tell(run_dir, report)
    return 0


def compare_and_tell(run_dir: Path, report: Reporter) -> None:
    """What `compare` does. Raises as `compare_run`."""
    from ..observe.console import START_UP_STAGES

    report.stage(START_UP_STAGES["imports"])
    from ...core.metrics import read_metrics
    from ..jobs.plain_static import compare_run
    from ..observe.outcome_checks import faults

    done = compare_run(run_dir, report)
    report.stop()
    report.note(done.text)
    for fault in faults(read_metrics(run_dir / "metrics.jsonl")):
        report.note(f"FAULT: {fault}")


def _lines(done: Verification) -> list[str]:
    lines = [f"checkpoints: {done.num_checkpoints} compared with their manifests"]
    lines.append(
        f"samples: {done.num_regenerated} of {done.num_recorded} generated again (seed {done.seed}), "
        f"{done.num_tokens:,} tokens, {done.num_rewards} rewards computed again"
    )
    lines += [f"  not verified: {count} samples: {why}" for why, count in done.unverified.items()]
    lines += [f"  {note}" for note in done.notes]
    if done.num_regenerated and done.generated_s:
        ratio = done.seconds / done.generated_s
        lines.append(
            f"  {done.seconds:.1f} s after a start of {done.start_s:.1f} s; the run took {done.generated_s:.1f} s "
            f"to generate them (x {ratio:.2f})"
        )
    shown = done.differences[:_MOST_DIFFERENCES]
    lines += [f"DIFFERS {difference}" for difference in shown]
    if len(shown) < len(done.differences):
        lines.append(f"... and {len(done.differences) - len(shown)} more")
    if not done.num_regenerated:
        lines.append("nothing was verified: no sample of this run could be generated again here")
    lines += [f"FAULT: {fault}" for fault in done.faults]
    lines.append(f"{len(done.differences)} differences")
    return lines


def replay(
    log: Annotated[Path, Arg("FILE", "a step log, or a folder of its files; with --sample a run folder")],
    *,
    sample: Annotated[int, Arg("N", "the sample with this index")] | None = None,
) -> int:
    """Check a step log's decisions, or look at one sample.

    Feed a step log to a fresh draft policy and compare every decision; name the first that differs.
    A run with run.step_log true writes the logs, a folder an instance, a file an iteration.

      rlhfspec replay runs/RUN/steps/gen-0    all iterations of an instance
      rlhfspec replay runs/RUN/steps/gen-0/iteration_0000.parquet

    With --sample, print one sample of a run: prompt, response, reward, who generated it with which weights, and each
    decode step of generating it again: what was drafted, what was accepted. It is alone then, so other steps than in
    the run; its tokens and log-probabilities are the same.

      rlhfspec replay runs/RUN --sample 17

    Exit codes: 0 every decision, or the sample, is the same, 1 something differs, 2 nothing that can be replayed.
    """
    if sample is not None:
        return _replay_sample(log, sample)
    from ...engine.draft_policies import build_policy
    from ...policies.drafting.replay import replay as replay_log
    from ...profiles.step_log import read_step_log

    records, origin = read_step_log(log)
    _require_whole(records, log)
    policy = build_policy(origin.speculation, origin.profile, takes_drafts=origin.takes_drafts)
    found = replay_log(policy, records)
    if found is None:
        print(
            f"{len(records)} decode steps of policy {origin.speculation.policy}: every decision comes out again"
        )
        return 0
    print(
        f"decode step {found.decode_step} differs: {found.what} is {found.recorded} in the log, "
        f"{found.replayed} in the replay"
    )
    return 1


def _replay_sample(run_dir: Path, index: int) -> int:
    from ..observe.console import START_UP_STAGES, Reporter

    with Reporter() as report:
        report.stage(START_UP_STAGES["imports"])
        from ..verify.choice import RecordedRun
        from ..verify.replay_sample import replay_sample, sample_lines

        replayed = replay_sample(RecordedRun.open(run_dir), index)
    for line in sample_lines(replayed):
        print(line)
    return 1 if replayed.differences else 0


def _require_whole(records: list[StepRecord], path: Path) -> None:
    """Raise DataError for a log that a fresh policy cannot follow: it decides by all steps before."""
    from ...core.errors import DataError

    if not records:
        raise DataError(f"{path} holds no decode step")
    for step, record in enumerate(records):
        if record.decode_step != step:
            what = "begins with" if step == 0 else f"goes from decode step {step - 1} to"
            raise DataError(
                f"{path} {what} decode step {record.decode_step}, expected {step}: a policy decides by all steps "
                "before; give the instance's folder, with the files of all iterations"
            )
