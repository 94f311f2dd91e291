"""A training run that has ended, as the simulator is compared with it: batches with their lengths, seconds of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.simulated_runs.core_watch import Background
from rlhfspec.cluster.proof.recorded_samples import rollout_files
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import load_config
from rlhfspec.core.metrics import read_metrics
from rlhfspec.policies.simulate.simulation_records import Samples

_COLUMNS = ("prompt_token_ids", "response_token_ids", "advantage", "group_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one update learns from."""

    samples: Samples
    trained: np.ndarray
    "[n] samples that have a gradient: the others of a group whose rewards are equal have none"

    @property
    def tokens(self) -> int:
        """Of all samples, prompts included."""
        return int((self.samples.prompt_tokens + self.samples.response_tokens).sum())

    @property
    def trained_tokens(self) -> int:
        """Of those with a gradient."""
        return int((self.samples.prompt_tokens + self.samples.response_tokens)[self.trained].sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """One entry of `batches` and of `metrics` an iteration."""

    config: Config
    batches: Sequence[Batch]
    metrics: Sequence[Mapping[str, float]]
    background: Background
    "neither instances nor trainer: scheduler, rewards, driver, Ray, and whatever else ran here"

    @property
    def staleness(self) -> int:
        """K."""
        return self.config.rollout.max_staleness

    @property
    def compared(self) -> range:
        """Iterations that are: the first fills caches and the pipeline, the last of a run ahead samples nothing."""
        return range(1, len(self.metrics) - (1 if self.staleness else 0))

    def seconds(self, name: str) -> np.ndarray:
        """[iterations] of a metric `time/NAME_s`; 0 where it is not set."""
        return np.array([row.get(f"time/{name}_s", 0.0) for row in self.metrics])

    @property
    def update_s(self) -> np.ndarray:
        """[iterations] of each update, whatever went on beside it."""
        return self.seconds("update") + self.seconds("update_hidden")

    @property
    def other_s(self) -> np.ndarray:
        """[iterations] of what is neither generation nor update nor publication: scores, refits, files."""
        return self.seconds("iteration") - sum(
            self.seconds(name) for name in ("generate", "update", "publish")
        )


def read_run(folder: Path, *, background: Background) -> RecordedRun:
    """Read a run folder; `background` was measured meanwhile. Raises InputError for one that cannot be read."""
    return RecordedRun(
        config=load_config(folder / "config.yaml"),
        batches=[_batch(file) for file in rollout_files(folder)],
        metrics=read_metrics(folder / "metrics.jsonl"),
        background=background,
    )


def _batch(file: Path) -> Batch:
    table = pq.read_table(file, columns=list(_COLUMNS))

    def lengths(column: str) -> np.ndarray:
        chunks = [np.asarray(chunk.value_lengths(), dtype=np.int64) for chunk in table[column].chunks]
        return np.concatenate([np.zeros(0, dtype=np.int64), *chunks])

    prompts, responses, *_ = _COLUMNS
    advantage = np.array(table["advantage"].to_pylist(), dtype=float)
    return Batch(
        samples=Samples(
            response_tokens=lengths(responses),
            prompt_tokens=lengths(prompts),
            speed=np.ones(len(table)),
            group=np.array(table["group_id"].to_pylist(), dtype=np.int64),
        ),
        # none is known where the run broke off
        trained=np.isnan(advantage) | (advantage != 0.0),
    )
