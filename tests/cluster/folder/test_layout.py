"""A run has a folder of its own: chosen, made whole or not at all, and holding what it was asked."""

from __future__ import annotations

import errno
from datetime import datetime
from pathlib import Path

import pytest

from rlhfspec.cluster.folder.layout import JOB_RUNS_FOLDER, RunDir, choose_run_path
from rlhfspec.core.config import RunConfig
from rlhfspec.core.config_io import config_from_dict, load_config
from rlhfspec.core.errors import ConfigError

NOON = datetime(2026, 1, 2, 12, 0, 0)
CONFIG = config_from_dict({"data": {"task": "chain"}, "models": {"draft": "demo"}})


def test_the_run_folder_is_absolute_and_never_used_twice(tmp_path: Path) -> None:
    run = RunConfig(name="r", output_dir="runs")
    first = choose_run_path(run, caller_dir=tmp_path, now=NOON)
    assert first == tmp_path / "runs" / "r-20260102-120000"
    first.mkdir(parents=True)
    assert choose_run_path(run, caller_dir=tmp_path, now=NOON) == first.with_name(f"{first.name}-2")
    # trainers have another working directory, and write there
    assert choose_run_path(run, caller_dir=tmp_path, now=NOON, out=Path("mine")) == tmp_path / "mine"


def test_two_runs_that_chose_one_folder_get_two(tmp_path: Path) -> None:
    run = RunConfig(name="r", output_dir="runs")
    chosen = [choose_run_path(run, caller_dir=tmp_path, now=NOON) for _ in range(3)]
    assert len(set(chosen)) == 1
    made = [RunDir.create(CONFIG, path).path.name for path in chosen]
    assert made == ["r-20260102-120000", "r-20260102-120000-2", "r-20260102-120000-3"]


@pytest.mark.parametrize("place", ["file", "file/deep", "/proc/x", "x" * 300])
def test_a_place_where_no_folder_can_be_made_is_refused_before_the_run(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make a run folder in .*; set run\.output_dir to a folder"):
        choose_run_path(RunConfig(output_dir=place), caller_dir=tmp_path, now=NOON)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_no_half_made_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rlhfspec.cluster.folder.layout.dump_config", full)
    with pytest.raises(ConfigError, match="No space left on device; free some space there"):
        RunDir.create(CONFIG, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_job_never_writes_into_the_folder_that_ray_deletes() -> None:
    job_dir = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1")
    path = choose_run_path(RunConfig(), caller_dir=job_dir, now=NOON)
    assert path.parent == Path(JOB_RUNS_FOLDER).expanduser()
    with pytest.raises(ConfigError, match=r"run\.output_dir must outlive the job"):
        choose_run_path(RunConfig(output_dir=str(job_dir / "runs")), caller_dir=job_dir, now=NOON)


def test_the_run_folder_holds_the_resolved_config_and_its_state(tmp_path: Path) -> None:
    run_dir = RunDir.create(CONFIG, tmp_path / "run")
    assert load_config(run_dir.config_file) == CONFIG
    assert (run_dir.status()["state"], run_dir.status()["reason"]) == ("running", "")
    run_dir.set_status("failed", "because")
    status = RunDir.open(tmp_path / "run").status()
    assert (status["state"], status["reason"]) == ("failed", "because")
    assert not list(run_dir.path.glob(".partial-*"))
