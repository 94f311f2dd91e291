"""Decodes a run's last batch once more on Ray, without speculation and moves, and compares tokens and seconds.

The run's own instances in number and kind, its weights, keys and rewards; every sample is bound to an instance in turn,
as engines do that split a batch up front. Weights must be kept: `run.checkpoint_every: 1` keeps every version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...core.errors import DataError, NumericsError
from ...core.metrics import read_metrics
from ...core.records import EPOCHS_OF_A_ROUND, SampleRequest, SamplingParams
from ...learning.data.prompts import sampling_params
from ..folder.layout import RunDir
from ..folder.rollouts import Recorded, locations_in, read_recorded, rollout_files
from ..observe.console import Reporter
from ..observe.run_record import Comparison
from ..plan.run_check import check_run
from ..plan.run_plan import RunPlan
from ..ray_start.ray_session import ray_session
from ..run.stream import Collected, RolloutStream
from ..system.system import running_generation
from ..verify.choice import RecordedRun, why_not_here
from ..verify.kept_weights import KeptModel, find_weights
from ..verify.verification import completion_differences

PLAIN_STATIC = (
    "speculation.policy=off",
    "drafter_training.mode=refit",
    "drafter_training.spot=auto",
    "reallocation.policy=static",
)
_BESIDE = ("cluster.dashboard=false", "run.copy_to=null", "run.step_log=false")
"Of the run's config, what its batch does not depend on."
_WARM_UP_TOKENS = 8
"Of one response a slot, before the clock runs: the run's instances had decoded before."


def compare_run(folder: Path, report: Reporter) -> Comparison:
    """Decode the last batch whose weights are kept once more; the run folder gets `comparison.json`.

    Raises DataError: nothing of the run can be compared; NumericsError: a token, or its log-probability, differs;
    and what the stream raises.
    """
    run = RecordedRun.open(folder)
    _require_comparable(run)
    metrics_file = RunDir(path=run.folder).metrics_file
    rows = read_metrics(metrics_file) if metrics_file.is_file() else []
    weights, samples = _last_batch(run, {int(row["iteration"]): row for row in rows if "iteration" in row})
    iteration = samples[0].location.iteration
    row = next(row for row in rows if row.get("iteration") == iteration)
    plain = RecordedRun.open(folder, [*PLAIN_STATIC, *_BESIDE, f"models.target={weights.name}"])
    report.stage(f"decoding iteration {iteration + 1} once more, plain and static")
    plan = check_run(plain.config, output_dir=run.folder, keeps_ends=True)
    again = _decode(plan, samples, report)
    _require_equal(run, samples, again)
    step_s = row["time/iteration_s"] - row.get("time/evaluate_s", 0.0)
    done = Comparison(
        iteration=iteration,
        num_samples=len(samples),
        num_tokens=sum(len(sample.rollout.completion.token_ids) for sample in samples),
        rollout_s=row["time/generate_s"],
        step_s=step_s,
        plain_rollout_s=again.generate_s,
        plain_step_s=step_s - row["time/generate_s"] - row.get("time/refit_s", 0.0) + again.generate_s,
    )
    done.write(RunDir(path=run.folder).comparison_file)
    return done


def _require_comparable(run: RecordedRun) -> None:
    """Raise DataError for a run whose iterations are no batches that are decoded alone."""
    why_not = why_not_here(run)
    if run.config.environment.kind is not None:
        why_not = "an environment took part in its responses, and cannot be asked again"
    elif run.config.rollout.max_staleness:
        why_not = "it sampled beside updates (rollout.max_staleness), so that no batch has seconds of its own"
    if why_not:
        raise DataError(f"{run.folder} cannot be decoded once more: {why_not}")


def _last_batch(
    run: RecordedRun, metrics: Mapping[int, Mapping[str, float]]
) -> tuple[KeptModel, list[Recorded]]:
    """The last iteration that is finished and whose weights are kept whole, and its samples."""
    kept = find_weights(run.folder, run.config.models.target)
    for file in reversed(rollout_files(run.folder)):
        locations = locations_in(file)
        versions = {version for location in locations for version in location.weight_versions}
        row = metrics.get(locations[0].iteration) if locations else None
        if row is None or row.get("rollout/invariant") == 0.0 or len(versions) != 1:
            # not finished, or without promised bits, or gone on with across an update
            continue
        if (version := versions.pop()) in kept.targets:
            return kept.targets[version], read_recorded(locations)
    raise DataError(
        f"{run.folder} has no finished iteration whose weights are kept and whose bits were promised; expected one: "
        "run.checkpoint_every=1 with run.keep_checkpoints=2 keeps those of the last"
    )


def _decode(plan: RunPlan, samples: Sequence[Recorded], report: Reporter) -> Collected:
    """The samples anew, in their order."""
    config, tokenizer = plan.config, plan.inputs.tokenizer
    sampling = sampling_params(config.sampling, tokenizer, model=config.models.target)
    # files keep neither a prompt's messages nor its fields, which rewards may read
    prompts = {prompt.prompt_id: prompt for prompt in plan.inputs.dataset.prompts}
    slots = config.engine.max_running_samples * config.cluster.generation.num_actors

    def requests(of: SamplingParams, round_number: int) -> list[SampleRequest]:
        return [
            SampleRequest(
                key=sample.location.key,
                prompt=prompts.get(sample.rollout.prompt.prompt_id, sample.rollout.prompt),
                sampling=of,
                group_id=sample.rollout.completion.group_id,
                epoch=round_number * EPOCHS_OF_A_ROUND,
            )
            for sample in samples
        ]

    with (
        ray_session(config.cluster, "plain-static", note=report.note) as session,
        running_generation(plan, session, note=report.note) as system,
    ):
        stream = RolloutStream(system, report)
        short = min(_WARM_UP_TOKENS, sampling.max_new_tokens)
        stream.collect(requests(replace(sampling, max_new_tokens=short), 0)[:slots], label="warm up")
        return stream.collect(requests(sampling, 1), label="decode again")


def _require_equal(run: RecordedRun, samples: Sequence[Recorded], again: Collected) -> None:
    """Raise NumericsError where a sample did not come again, bit for bit."""
    of_key = {rollout.completion.key: rollout.completion for rollout in again.rollouts}
    for sample in samples:
        file, key = run.relative(sample.location.file), sample.location.key
        if key not in of_key:
            raise DataError(
                f"{file}: sample {key.sample_index} could not be scored when it was decoded again"
            )
        for difference in completion_differences(file, sample.rollout.completion, of_key[key]):
            raise NumericsError(f"speculation or a move has changed a sample: {difference}")
