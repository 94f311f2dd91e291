"""Everything that is written of a run's iterations: rollouts, weights, metrics, histograms, samples, other trackers.

Nothing is written into a folder that another process has taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...core.files import storage_errors, write_whole
from ...core.metrics import MetricsLog
from ...core.records import Rollout, UpdateReport
from ...core.settings.tracking import TrackingConfig
from ...core.weight_records import WeightManifest
from ...learning.training.objectives.minibatch_metrics import LOG_RATIO_BINS, LOG_RATIO_WIDTH
from ..folder.iteration_logs import Histogram, note_weights, write_histograms
from ..folder.layout import RunDir
from ..folder.rollouts import write_rollouts
from ..folder.sample_table import SampleRow, as_markdown, choose_samples
from ..folder.trackers import Trackers
from ..observe.iteration_metrics import distribution_metrics


class RunLog:
    """Of one run. Iterations count from 0; trackers get the number of finished ones as their step.

    Every method that writes raises RunTaken first where another process goes on with the run.
    """

    def __init__(self, tracking: TrackingConfig, run_dir: RunDir, trackers: Trackers) -> None:
        self._tracking, self._run_dir, self._trackers = tracking, run_dir, trackers
        self._metrics = MetricsLog(run_dir.metrics_file)

    @classmethod
    def begin(
        cls, tracking: TrackingConfig, run_dir: RunDir, note: Callable[[str], None], *, num_done: int
    ) -> RunLog:
        """With the trackers that are asked for, which hear of what goes wrong by `note`."""
        run_dir.owner.require()
        return cls(tracking, run_dir, Trackers.of(tracking, run_dir, note, num_done=num_done))

    def rollouts(
        self,
        iteration: int,
        rollouts: Sequence[Rollout],
        advantages: Sequence[float | None] | None = None,
    ) -> None:
        """Write an iteration's rollouts, again once their advantages are known. Raises StorageError."""
        self._run_dir.owner.require()
        write_rollouts(self._run_dir.rollouts_file(iteration), rollouts, advantages)

    def weights(self, manifest: WeightManifest) -> None:
        """Note a version of the target that instances have confirmed. Raises StorageError."""
        self._run_dir.owner.require()
        note_weights(self._run_dir.weights_file, manifest)

    def record(self, iteration: int, rollouts: Sequence[Rollout], update: UpdateReport) -> dict[str, float]:
        """Keep what was learned from as histograms and samples; return the metrics of its distribution.

        `rollouts` in the order of their sample index. Raises StorageError.
        """
        self._run_dir.owner.require()
        advantages = update.sample_advantages
        values: dict[str, Sequence[float]] = {
            "response_tokens": [rollout.completion.num_sampled_tokens for rollout in rollouts],
            "reward": [rollout.reward.value for rollout in rollouts],
        }
        if advantages is not None:
            values["advantage"] = advantages
        write_histograms(self._run_dir.histograms_file, iteration, values, _log_ratios(update))
        self._trackers.log(iteration + 1, histograms=values)
        self._keep_samples(iteration, rollouts, advantages)
        metrics = distribution_metrics(rollouts, advantages)
        return metrics | {"learner/num_optimizer_steps": float(update.num_optimizer_steps)}

    def before_training(self, metrics: Mapping[str, float]) -> None:
        """Hand on what the first weights' evaluation gave."""
        if metrics:
            self._trackers.log(0, metrics=metrics)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one iteration. Raises StorageError; RlhfSpecError for one that may not be set."""
        self._run_dir.owner.require()
        self._metrics.write(iteration, metrics)
        self._trackers.log(iteration + 1, metrics=metrics)

    def close(self) -> None:
        """End the trackers."""
        self._trackers.close()

    def _keep_samples(
        self, iteration: int, rollouts: Sequence[Rollout], advantages: Sequence[float] | None
    ) -> None:
        if not self._tracking.samples:
            return
        rows = [
            SampleRow.of(rollout, advantage)
            for rollout, advantage in zip(rollouts, advantages or [None] * len(rollouts), strict=True)
        ]
        chosen = choose_samples(rows, self._tracking.samples, seed=iteration)
        path = self._run_dir.samples_file(iteration)
        with storage_errors(path):
            path.parent.mkdir(exist_ok=True)
        write_whole(path, as_markdown(f"Iteration {iteration + 1}", chosen))
        self._trackers.log(iteration + 1, samples=chosen)


def _log_ratios(update: UpdateReport) -> dict[str, Histogram]:
    """How far the policy moved at each token, over all optimizer steps."""
    if not any(update.log_ratio_counts):
        return {}
    first = -LOG_RATIO_WIDTH * (LOG_RATIO_BINS // 2)
    return {"log_ratio": Histogram(first=first, width=LOG_RATIO_WIDTH, counts=update.log_ratio_counts)}
