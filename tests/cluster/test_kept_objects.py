"""What writes and shows a run keeps no object of an iteration that is over."""

from __future__ import annotations

import gc
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from made_moves import three_moves
from made_rollouts import rollout

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.console import PipeConsole, Reporter
from rlhfspec.cluster.observe.iteration_metrics import iteration_metrics
from rlhfspec.cluster.observe.summary import signal_line, with_signal
from rlhfspec.cluster.run.recorder import Recorder
from rlhfspec.cluster.run.run_log import RunLog
from rlhfspec.cluster.run.stream import Collected
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.decode_records import GenerationStats
from rlhfspec.core.records import UpdateReport

SECONDS = dict.fromkeys(("generate", "score", "update", "publish", "refit", "evaluate", "iteration"), 1.0)
SAMPLES, WARM_UP, ITERATIONS = 8, 5, 20


class Written:
    """A run's record, written as the loop does it, of made-up iterations."""

    def __init__(self, folder: Path) -> None:
        config = config_from_dict(
            {"models": {"target": "a", "draft": "b"}, "data": {"task": "chain"}, "tracking": {"samples": 4}}
        )
        run_dir = RunDir.create(config, folder / "run")
        self.report = Reporter(PipeConsole(file=io.StringIO(), width=200))
        self.report.start(WARM_UP + 3 * ITERATIONS)
        self.log = RunLog.begin(config.tracking, run_dir, self.report.note, num_done=0)
        self.recorder = Recorder(run_dir, self.report)
        self.num_done = 0

    def iterations(self, number: int) -> None:
        for _ in range(number):
            self.iteration(self.num_done)
            self.num_done += 1

    def iteration(self, iteration: int) -> None:
        rng = np.random.default_rng(iteration)
        rollouts = [
            rollout(index, group=index // 2, reward=float(rng.random()), parts={"fits": 1.0})
            for index in range(SAMPLES)
        ]
        stats = GenerationStats(num_decode_steps=4, num_emitted_tokens=32, verify_s=16.0)
        collected = Collected(
            rollouts=rollouts,
            stats=stats,
            moves=tuple(three_moves()),
            planning_s=0.1,
            generate_s=1.0,
            generated_s=1.0,
            score_s=0.0,
        )
        update = UpdateReport(
            weight_version=iteration + 1,
            num_samples=SAMPLES,
            num_tokens=32,
            num_optimizer_steps=1,
            metrics={"grad_norm": 0.0, "lr": 1e-5},
            sample_advantages=tuple(float(index) for index in range(SAMPLES)),
        )
        self.log.rollouts(iteration, rollouts)
        moves = self.recorder.record(iteration, collected, {})
        self.report.progress("update", 0, 1)
        metrics = iteration_metrics(rollouts, stats, update, SECONDS) | moves
        metrics = with_signal(metrics | self.log.record(iteration, rollouts, update))
        self.log.write(iteration, metrics)
        self.report.iteration(iteration, metrics)
        self.report.note(str(signal_line(iteration, metrics)))


@pytest.fixture
def without_what_is_there() -> Iterator[None]:
    """Objects that are there already, those of imports, are neither counted nor looked at again."""
    yield
    gc.unfreeze()


def test_an_iteration_that_is_over_leaves_no_object(tmp_path: Path, without_what_is_there: None) -> None:
    run = Written(tmp_path)
    run.iterations(WARM_UP)
    gc.collect()
    gc.freeze()
    # the first count has objects that counting itself leaves, once
    _, before, after = (counted(run) for _ in range(3))
    grown = after - before
    # one kept rollout is several objects, of each of eight samples, in each iteration
    assert sum(grown.values()) < ITERATIONS, grown.most_common(8)


def counted(run: Written) -> Counter[str]:
    """Objects by type after so many more iterations."""
    run.iterations(ITERATIONS)
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects())
