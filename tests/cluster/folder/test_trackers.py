"""Trackers: by their own libraries where they are installed; one that fails is told of once and ends no run."""

from __future__ import annotations

import importlib.util
import json
from contextlib import contextmanager
from pathlib import Path

import pytest
from made_rollouts import rollout
from scripted_pool import weights

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.folder.sample_table import SampleRow, choose_samples
from rlhfspec.cluster.folder.trackers import Trackers, require_trackers
from rlhfspec.cluster.run.run_log import RunLog
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import ConfigError, RunTaken
from rlhfspec.core.metrics import read_metrics
from rlhfspec.core.records import UpdateReport

ROLLOUTS = [rollout(index, reward=float(index), parts={"length": 1.0}) for index in range(6)]
UPDATE = UpdateReport(
    weight_version=1,
    num_samples=6,
    num_tokens=24,
    num_optimizer_steps=2,
    metrics={},
    sample_advantages=tuple(float(index) - 2.5 for index in range(6)),
)


def config(**tracking) -> Config:
    tree = {"models": {"target": "a", "draft": "b"}, "data": {"task": "chain"}, "tracking": tracking}
    return config_from_dict(tree)


def needs(package: str):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def run_log(made: Config, folder: Path, trackers: Trackers) -> tuple[RunLog, RunDir]:
    run_dir = RunDir.create(made, folder / "run")
    return RunLog(made.tracking, run_dir, trackers), run_dir


def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(tmp_path):
    """It takes one step and then no more, and is not called again, not to close either."""
    notes: list[str] = []
    taken: list[int] = []

    def take(step: int, *_: object) -> None:
        if taken:
            raise ConnectionError("the server is gone")
        taken.append(step)

    @contextmanager
    def failing():
        yield take
        pytest.fail("closed")

    log, run_dir = run_log(config(), tmp_path, Trackers({"Failing": failing}, notes.append))
    for iteration in range(4):
        log.write(iteration, {"reward/mean": 0.5})
    log.close()
    assert taken == [1] and len(read_metrics(run_dir.metrics_file)) == 4
    (note,) = notes
    assert "Failing could not take step 2" in note and "the server is gone" in note


def test_a_tracker_that_cannot_start_is_told_and_left_out():
    def broken():
        raise OSError("no route")

    notes: list[str] = []
    Trackers({"Broken": broken}, notes.append).log(0, metrics={"a": 1.0})
    (note,) = notes
    assert "Broken could not start" in note


@pytest.mark.parametrize(
    ("tracking", "package"), [({"tensorboard": True}, "tensorboard"), ({"wandb": {}}, "wandb")]
)
def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(monkeypatch, tracking, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(ConfigError, match=rf"package {package} is not installed.*pip install"):
        require_trackers(config(**tracking).tracking)
    require_trackers(config().tracking)


def test_an_iteration_leaves_samples_histograms_and_metrics(tmp_path):
    log, run_dir = run_log(config(samples=4), tmp_path, Trackers({}, print))
    metrics = log.record(11, ROLLOUTS, UPDATE)
    text = (run_dir.path / "samples" / "iteration-00011.md").read_text()
    assert text.count("## Sample") == 4 and "advantage +2.500" in text
    (row,) = [json.loads(line) for line in run_dir.histograms_file.read_text().splitlines()]
    assert row["iteration"] == 11 and {"response_tokens", "reward", "advantage"} <= row.keys()
    assert metrics["learner/num_optimizer_steps"] == 2.0


def test_no_samples_are_written_where_none_are_asked_for(tmp_path):
    log, run_dir = run_log(config(samples=0), tmp_path, Trackers({}, print))
    log.record(0, ROLLOUTS, UPDATE)
    assert not (run_dir.path / "samples").exists()


def test_nothing_is_written_into_a_run_that_another_process_has_taken(tmp_path):
    log, run_dir = run_log(config(samples=4), tmp_path, Trackers({}, print))
    other = RunDir.open(run_dir.path)
    assert other.owner.claim(after=other.owner.last())

    def files() -> list[Path]:
        return sorted(path for path in run_dir.path.rglob("*") if path.is_file())

    before = files()
    for write in (
        lambda: log.rollouts(0, ROLLOUTS),
        lambda: log.weights(weights().manifest),
        lambda: log.record(0, ROLLOUTS, UPDATE),
        lambda: log.write(0, {"reward/mean": 0.5}),
        lambda: RunLog.begin(config().tracking, run_dir, print, num_done=0),
    ):
        with pytest.raises(RunTaken, match="this one ends here"):
            write()
    assert files() == before
    theirs = RunLog.begin(config().tracking, other, print, num_done=0)
    theirs.rollouts(0, ROLLOUTS)
    theirs.weights(weights().manifest)
    assert {path.name for path in files()} - {path.name for path in before} == {
        "iteration_0000.parquet",
        "weights.jsonl",
    }


def track(made: Config, folder: Path) -> RunDir:
    notes: list[str] = []
    run_dir = RunDir.create(made, folder / "run")
    log = RunLog(made.tracking, run_dir, Trackers.of(made.tracking, run_dir, notes.append))
    log.before_training({"eval/reward_mean": 0.25})
    for iteration in range(2):
        log.write(iteration, {"reward/mean": 0.5 + iteration, **log.record(iteration, ROLLOUTS, UPDATE)})
    log.close()
    assert notes == []
    return run_dir


@needs("tensorboard")
def test_tensorboard_reads_back_what_was_written(tmp_path):
    run_dir = track(config(tensorboard=True), tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir.path / "tensorboard"), {"histograms": 0}).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.5), (2, 1.5)]
    assert [e.step for e in events.Scalars("eval/reward_mean")] == [0]
    assert len(events.Histograms("histogram/advantage")) == 2
    assert "samples/text_summary" in events.Tags()["tensors"]


@needs("wandb")
def test_wandb_offline_writes_a_run_into_the_run_folder(tmp_path):
    run_dir = track(config(wandb={"project": "p", "mode": "offline"}), tmp_path)
    (file,) = (run_dir.path / "wandb").glob("offline-run-*/*.wandb")
    assert file.stat().st_size > 0
    assert list((run_dir.path / "wandb").glob("offline-run-*/files/media/table/samples*"))


def test_chosen_samples_hold_the_advantage_of_their_own_sample():
    rows = [SampleRow.of(one, advantage=float(i)) for i, one in enumerate(ROLLOUTS)]
    assert all(row.advantage == row.sample_index for _, row in choose_samples(rows, 6, seed=0))
