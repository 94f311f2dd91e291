"""However a run ends, the folder says so; a summary that fails neither hides what ended it nor ends it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import rlhfspec.cluster.observe.run_record
import rlhfspec.cluster.run.loop
from rlhfspec.cluster.cli import main
from rlhfspec.cluster.commands import train
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.plan.run_profile import RunProfile
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import ConfigError, InstanceLost, StorageError
from tests.conftest import TinyPair

CONFIG: Config = config_from_dict({"models": {"target": "a", "draft": "b"}, "data": {"task": "chain"}})


NO_STATE = "no state to go on from is kept yet (run.state_every): start it anew"


class Notes(Reporter):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir.create(CONFIG, tmp_path / "run")
    made.metrics_file.write_text(json.dumps({"iteration": 0.0, "reward/mean": 0.5}) + "\n")
    return made


def end(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, report: Notes | None = None
) -> Notes:
    """Run a loop that ends so."""

    def loop(*_: Any) -> None:
        if error is not None:
            raise error

    report = report or Notes()
    monkeypatch.setattr(rlhfspec.cluster.run.loop, "run_training", loop)
    train._train(None, run_dir, report)  # type: ignore[arg-type]
    return report


def break_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no mean")

    monkeypatch.setattr(rlhfspec.cluster.observe.run_record, "summarise", fail)


def test_a_run_that_measures_its_profile_has_its_folder_already(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch, capsys
):
    """From then on `status` says that it is starting, and how it ended if that is cut off."""
    out, seen = tmp_path / "run", []

    def stopped(*_: Any) -> None:
        assert main(["status", str(out)]) == 0
        seen.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunProfile, "resolve", stopped)
    tree = {
        "run": {"iterations": 1, "cache_dir": str(tmp_path / "cache")},
        "models": {"target": str(tiny_pair.target), "draft": str(tiny_pair.draft)},
        "data": {"task": "chain", "limit": 8},
        "sampling": {"max_new_tokens": 16},
        "rollout": {"prompts_per_iteration": 4},
        "trainer": {"minibatch_size": 4, "num_threads": 1},
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(tree))
    assert main(["train", "--config", str(file), "--out", str(out)]) == 130
    (shown,) = seen
    assert "state running: process" in shown and "starting, before the first iteration" in shown
    run = RunDir.open(out)
    assert run.status()["state"] == "interrupted" and run.status()["reason"].startswith("stopped by Ctrl-C")
    for command in ("explain", "report"):
        assert main([command, str(out)]) == 2
        assert "no iteration of RLHF has finished" in capsys.readouterr().err


def test_a_finished_run_has_its_summary_and_says_what_to_change(run_dir, monkeypatch):
    report = end(run_dir, monkeypatch, None)
    assert run_dir.status()["state"] == "finished"
    (change,) = report.notes
    assert change.startswith("change next: ") and change.endswith("(more: rlhfspec explain)")
    assert run_dir.summary_file.exists()


def test_a_finished_run_without_its_summary_is_finished_and_says_what_is_missing(run_dir, monkeypatch):
    break_summary(monkeypatch)
    report = end(run_dir, monkeypatch, None)
    assert run_dir.status()["state"] == "finished"
    assert report.notes == ["the summary is missing: RuntimeError: no mean"]


def test_damaged_metrics_do_not_turn_a_finished_run_into_a_failure(run_dir, monkeypatch):
    run_dir.metrics_file.write_text("{")
    report = end(run_dir, monkeypatch, None)
    assert run_dir.status()["state"] == "finished" and "is cut or damaged" in report.notes[-1]


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (InstanceLost("gen-0 died"), "failed", "gen-0 died"),
        (ZeroDivisionError("x"), "failed", "ZeroDivisionError: x"),
        (KeyboardInterrupt(), "interrupted", f"stopped by Ctrl-C; {NO_STATE}"),
        (SystemExit(3), "interrupted", "SystemExit: 3"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_the_reason_a_run_ended_is_printed_though_the_summary_fails_too(
    run_dir, monkeypatch, error, state, reason
):
    break_summary(monkeypatch)
    with pytest.raises(type(error)) as caught:
        end(run_dir, monkeypatch, error)
    assert caught.value is error and not caught.value.__context__
    assert (run_dir.status()["state"], run_dir.status()["reason"]) == (state, reason)


def test_the_reason_a_run_ended_is_printed_though_the_status_cannot_be_written(run_dir, monkeypatch):
    def fail(*_: Any) -> None:
        raise StorageError("no status")

    monkeypatch.setattr(RunDir, "set_status", fail)
    with pytest.raises(InstanceLost, match="gen-0 died"):
        end(run_dir, monkeypatch, InstanceLost("gen-0 died"))


def test_who_stops_a_run_is_told_how_to_go_on_with_it(run_dir, monkeypatch):
    for number in (5, 10):
        run_dir.checkpoint_dir("state", number).mkdir()
    python = f"in Python `rlhfspec.resume('{run_dir.path}')`"
    how = f"go on with `rlhfspec train --resume {run_dir.path}`, {python}, from iteration 11 on"
    assert run_dir.stopped("by SIGTERM") == f"by SIGTERM; {how}"
    report = Notes()
    with pytest.raises(KeyboardInterrupt):
        end(run_dir, monkeypatch, KeyboardInterrupt(), report)
    assert run_dir.status()["reason"] == f"stopped by Ctrl-C; {how}"
    assert report.notes[-1] == f"interrupted: stopped by Ctrl-C; {how}"


def test_the_reason_that_the_signal_handler_gave_stays(run_dir, monkeypatch):
    run_dir.set_status("stopping", "stopped by SIGTERM")
    close, states = train._close, []

    def closing(*arguments: Any, **options: Any) -> None:
        states.append(run_dir.status()["state"])
        close(*arguments, **options)

    monkeypatch.setattr(train, "_close", closing)
    with pytest.raises(SystemExit):
        end(run_dir, monkeypatch, SystemExit(143))
    assert (run_dir.status()["state"], run_dir.status()["reason"]) == ("interrupted", "stopped by SIGTERM")
    assert states == ["stopping"], "it still writes"
    assert run_dir.summary_file.exists()


def test_a_full_disk_that_anything_meets_is_one_clear_error(run_dir, monkeypatch):
    """The log beside the run's files, for one."""
    with pytest.raises(StorageError, match=r"run: expected room for it, got 'No space left"):
        end(run_dir, monkeypatch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert run_dir.status()["state"] == "failed" and not run_dir.summary_file.exists()


def test_a_run_that_cannot_begin_on_a_full_disk_leaves_no_folder(tmp_path: Path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(
        ConfigError, match=r"cannot begin the run: cannot write .*config\.yaml.*No space left"
    ):
        RunDir.create(CONFIG, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_has_vanished_is_said_to_be_gone(run_dir, monkeypatch, capsys):
    def vanish(*_: Any) -> None:
        shutil.rmtree(run_dir.path)
        raise StorageError("cannot write metrics.jsonl: No such file or directory")

    monkeypatch.setattr(rlhfspec.cluster.run.loop, "run_training", vanish)
    with pytest.raises(StorageError):
        train._train(None, run_dir, Reporter())  # type: ignore[arg-type]
    told = " ".join(capsys.readouterr().out.split())
    assert f"the run folder {run_dir.path} is gone" in told
    assert "no iteration finished" not in told and not run_dir.path.exists()
