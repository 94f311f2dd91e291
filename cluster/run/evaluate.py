"""Measures the policy on held-out prompts, by the run's own generation and reward pools, and keeps the best weights.

Every evaluation asks for the same samples under the same keys, of a stream of their own: equal weights give equal
tokens, and training is the same to the bit with evaluations or without. A key that is asked for again comes under
higher epochs (`core.records.next_round`). Neighbouring weights give nearly equal tokens: the last evaluation's
responses are drafts, and what changed is told over common noise (`evaluation.fresh_keys`: neither).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.errors import DataError
from ...core.files import append_whole, storage_errors
from ...core.records import EPOCHS_OF_A_ROUND, Rollout, SampleKey, SampleRequest, Stream
from ...core.settings.evaluation import MAX_SAMPLES_PER_PROMPT
from ..folder.layout import RunDir
from ..folder.rollouts import locations_in, read_recorded, write_rollouts
from ..observe.console import Reporter
from ..observe.iteration_metrics import evaluation_metrics
from ..observe.paired_change import paired_change
from ..plan.evaluation_prompts import EvaluationPrompts
from ..resume.checkpoints import save_best
from ..resume.run_state import EvaluationMarks
from ..system.system import System
from .recorder import Recorder
from .stream import Collected, RolloutStream

_ALWAYS_THERE = "eval/reward_mean"
_MOST_SAMPLES = 1 << 40
"Of one evaluation: those of another with fresh keys come behind."
Earlier = Mapping[SampleKey, Rollout]
"Rollouts of other weights by their keys."


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One evaluation."""

    collected: Collected
    metrics: dict[str, float]
    seconds: float


def evaluation_requests(
    evaluation: EvaluationPrompts,
    *,
    round_number: int,
    fresh_keys: bool = False,
    earlier: Earlier | None = None,
) -> list[SampleRequest]:
    """The samples of an evaluation, those of one prompt side by side; `round_number` counts those of a run from 0.

    A sample's index depends on its prompt's place and its own number alone: more samples a prompt, or more prompts,
    leave the others as they are; with `fresh_keys` on the round, too. `earlier` responses are drafts.
    """
    first = round_number * _MOST_SAMPLES if fresh_keys else 0

    def request(place: int, number: int) -> SampleRequest:
        index, prompt = first + place * MAX_SAMPLES_PER_PROMPT + number, evaluation.prompts[place]
        key = SampleKey(run_seed=evaluation.run_seed, stream=Stream.EVAL, sample_index=index)
        known = (earlier or {}).get(key)
        is_same = known is not None and np.array_equal(known.prompt.token_ids, prompt.token_ids)
        return SampleRequest(
            key=key,
            prompt=prompt,
            sampling=evaluation.sampling,
            group_id=place,
            epoch=round_number * EPOCHS_OF_A_ROUND,
            draft=known.completion.token_ids if known is not None and is_same else None,
        )

    places = range(len(evaluation.prompts))
    return [request(place, number) for place in places for number in range(evaluation.samples_per_prompt)]


def evaluate(
    stream: RolloutStream, requests: Sequence[SampleRequest], earlier: Earlier | None = None
) -> Evaluated:
    """Generate and score the samples with the weights that the instances hold. Raises what the stream raises.

    Of `earlier` rollouts under the same keys the change is told.
    """
    began_s = time.perf_counter()
    collected = stream.collect(requests, label="evaluate")
    metrics = evaluation_metrics(collected.rollouts, collected.skipped_groups)
    metrics |= paired_change(collected.rollouts, earlier or {})
    return Evaluated(collected=collected, metrics=metrics, seconds=time.perf_counter() - began_s)


def by_key(rollouts: Sequence[Rollout]) -> dict[SampleKey, Rollout]:
    """The rollouts of an evaluation, for the next one."""
    return {rollout.completion.key: rollout for rollout in rollouts}


class Evaluator:
    """The evaluations of one run; does nothing where the run has none."""

    def __init__(
        self,
        system: System,
        stream: RolloutStream,
        run_dir: RunDir,
        report: Reporter,
        recorder: Recorder,
        marks: EvaluationMarks | None = None,
    ) -> None:
        """`marks`: of the run that is gone on with."""
        self._system, self._stream, self._run_dir = system, stream, run_dir
        self._report, self._recorder = report, recorder
        self._settings = system.config.evaluation
        marks = marks or EvaluationMarks()
        self._metric = marks.metric or self._settings.metric
        self._num_done, self._best, self._num_not_better = marks.num_done, marks.best, marks.num_not_better
        self._earlier = {} if self._settings.fresh_keys or not self._num_done else _last_of(run_dir, report)

    @property
    def marks(self) -> EvaluationMarks:
        """What a state keeps."""
        return EvaluationMarks(
            num_done=self._num_done,
            best=self._best,
            metric=self._metric,
            num_not_better=self._num_not_better,
        )

    @property
    def reason_to_stop(self) -> str | None:
        """Why no further iteration is worth it; None: it may be."""
        patience = self._settings.early_stopping_patience
        if patience is None or self._num_not_better < patience:
            return None
        return (
            f"{self._metric} was not above its best, {self._best:.4g}, in {self._num_not_better} evaluations: the run "
            "ends here (evaluation.early_stopping_patience)"
        )

    def at_start(self) -> dict[str, float]:
        """Evaluate the first weights, where asked for; they set the mark that a best checkpoint has to pass."""
        if self._system.evaluation is None:
            return {}
        for line in self._system.evaluation.lines:
            self._report.note(line)
        if not self._settings.at_start:
            return {}
        return self._evaluate(self._system.evaluation, num_iterations=0)

    def after(self, iteration: int) -> dict[str, float]:
        """Evaluate after an iteration, counted from 0, where one is due; the metrics and `time/evaluate_s`."""
        num_iterations = iteration + 1
        is_last = num_iterations == self._system.config.run.iterations
        if self._system.evaluation is None or (num_iterations % self._settings.every and not is_last):
            return {}
        if self._stream.failure is not None:
            self._report.note("no evaluation: there are no more rewards; a resumed run makes the next one")
            self._num_done += 1
            return {}
        return self._evaluate(self._system.evaluation, num_iterations=num_iterations)

    def _evaluate(self, evaluation: EvaluationPrompts, *, num_iterations: int) -> dict[str, float]:
        began_s = time.perf_counter()
        system = self._system
        fresh_keys = self._settings.fresh_keys
        requests = evaluation_requests(
            evaluation, round_number=self._num_done, fresh_keys=fresh_keys, earlier=self._earlier
        )
        self._num_done += 1
        done = evaluate(self._stream, requests, self._earlier)
        self._earlier = {} if fresh_keys else by_key(done.collected.rollouts)
        self._recorder.pass_over(system.generation.instances)
        self._write_samples(done, num_iterations)
        is_best = self._take_mark(done.metrics) and num_iterations > 0
        if is_best and self._settings.keep_best:
            save_best(system, self._run_dir)
        row = {
            "num_iterations": num_iterations,
            "weight_version": system.target.manifest.weight_version,
            "is_best": float(is_best),
            **done.metrics,
            "time/evaluate_s": time.perf_counter() - began_s,
        }
        append_whole(self._run_dir.evaluations_file, json.dumps(row) + "\n")
        self._report.note(_line(num_iterations, done, self._metric, is_best=is_best))
        return done.metrics | {"time/evaluate_s": row["time/evaluate_s"]}

    def _take_mark(self, metrics: dict[str, float]) -> bool:
        """Whether this is better than every evaluation before it."""
        if self._metric not in metrics:
            # trained weights are worth more than the choice of the best: it goes on by what every reward has
            self._report.note(
                f"evaluation.metric is {self._metric}, but not every reward has a part 'correct' to make it of; the "
                f"best checkpoint is from here on chosen by {_ALWAYS_THERE}"
            )
            self._metric, self._best = _ALWAYS_THERE, None
        if self._best is not None and metrics[self._metric] <= self._best:
            self._num_not_better += 1
            return False
        self._best, self._num_not_better = metrics[self._metric], 0
        return True

    def _write_samples(self, done: Evaluated, num_iterations: int) -> None:
        path = self._run_dir.evaluated_file(num_iterations)
        with storage_errors(path):
            path.parent.mkdir(exist_ok=True)
        write_rollouts(path, done.collected.rollouts)


def _last_of(run_dir: RunDir, report: Reporter) -> dict[SampleKey, Rollout]:
    """What the run evaluated last before it was stopped; what cannot be read is told, and left out."""
    files = run_dir.evaluated_file(0).parent.glob("evaluation_*.parquet")
    last = max(files, key=lambda file: (len(file.name), file.name), default=None)
    try:
        return by_key([one.rollout for one in read_recorded(locations_in(last))]) if last else {}
    except DataError as error:
        report.note(f"the next evaluation has neither drafts nor a change to tell: {error}")
        return {}


def _line(num_iterations: int, done: Evaluated, metric: str, *, is_best: bool) -> str:
    shown = dict.fromkeys([metric, "eval/reward_mean", "eval/accuracy", "eval/pass_at_k"])
    metrics = "  ".join(
        f"{name.removeprefix('eval/')} {done.metrics[name]:.3f}" for name in shown if name in done.metrics
    )
    if (change := done.metrics.get("eval/reward_change")) is not None:
        stderr = done.metrics["eval/reward_change_stderr"]
        metrics += f"  change {change:+.3f} (standard error {stderr:.3f})"
    when = f"after iteration {num_iterations}" if num_iterations else "before the first iteration"
    return f"evaluation {when}: {metrics}  ({done.seconds:.1f} s{', the best so far' if is_best else ''})"
