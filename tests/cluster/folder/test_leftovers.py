"""What dead runs left is removed; nothing of live runs, of others, or of unknown origin is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhfspec.cluster.folder import leftovers as sweep
from rlhfspec.cluster.folder.leftovers import (
    OWNER_FILE,
    RAY_FOLDER,
    claim,
    sweep_ray_folders,
    sweep_run_folders,
)
from rlhfspec.cluster.folder.owner import ProcessIdentity, processes_using
from rlhfspec.cluster.folder.run_status import StatusWriter


def gone(**change: Any) -> str:
    """The owner that a process has written which is dead by now."""
    return json.dumps(ProcessIdentity.of_this().as_tree() | {"pid_started": 1} | change)


def ray_folder(temp: Path, name: str, owner: str | None) -> Path:
    folder = temp / (RAY_FOLDER + name)
    (folder / "session_1").mkdir(parents=True)
    if owner is not None:
        (folder / OWNER_FILE).write_text(owner)
    return folder


def test_a_folder_whose_owner_is_gone_is_removed(tmp_path: Path):
    folder = ray_folder(tmp_path, "dead", gone())
    (line,) = sweep_ray_folders(tmp_path)
    assert line == f"removed {folder}, left by process {os.getpid()}, which is gone"
    assert not folder.exists() and sweep_ray_folders(tmp_path) == []


@pytest.mark.parametrize(
    "owner",
    [
        None,
        "",
        "[]",
        "{}",
        '{"pid": "x", "host": "y"}',
        gone(host="elsewhere"),
        gone(pid_namespace="pid:[1]"),
    ],
    ids=["none", "empty", "list", "nothing", "wrong", "other host", "other container"],
)
def test_a_folder_of_an_owner_one_cannot_know_stays(tmp_path: Path, owner: str | None):
    folder = ray_folder(tmp_path, "odd", owner)
    assert sweep_ray_folders(tmp_path) == [] and folder.exists()


def test_a_folder_of_a_live_owner_of_another_user_a_link_and_another_name_stay(tmp_path: Path, monkeypatch):
    live = ray_folder(tmp_path, "live", None)
    claim(live)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / OWNER_FILE).write_text(gone())
    (tmp_path / (RAY_FOLDER + "link")).symlink_to(elsewhere)
    assert sweep_ray_folders(tmp_path) == []
    ray_folder(tmp_path, "theirs", gone())
    monkeypatch.setattr(sweep.os, "getuid", lambda: os.geteuid() + 1)
    assert sweep_ray_folders(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 4 and (elsewhere / OWNER_FILE).exists()


@pytest.mark.parametrize("use", ["command", "open file", "working folder"])
def test_a_folder_that_a_process_still_uses_stays(tmp_path: Path, use: str):
    folder = ray_folder(tmp_path, "used", gone())
    script = {
        "command": "import sys; print(flush=True); input()",
        "open file": f"file = open({str(folder / 'log')!r}, 'w'); print(flush=True); input()",
        "working folder": f"import os; os.chdir({str(folder)!r}); print(flush=True); input()",
    }[use]
    argv = [f"--session-dir={folder}/session_1"] if use == "command" else []
    child = subprocess.Popen(
        [sys.executable, "-c", script, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert processes_using(folder) == [child.pid]
        (line,) = sweep_ray_folders(tmp_path)
        assert line.startswith(f"left {folder} alone") and str(child.pid) in line and folder.exists()
    finally:
        child.kill()
        child.communicate()
    assert processes_using(folder) == []
    assert sweep_ray_folders(tmp_path) and not folder.exists()


def run_folder(output: Path, name: str, **change: Any) -> Path:
    """A run folder with something half-made, and a checkpoint caught between two renames."""
    run = output / name
    (run / "rollouts").mkdir(parents=True)
    (run / "checkpoints" / ".partial-draft").mkdir(parents=True)
    (run / "checkpoints" / ".replaced-target").mkdir()
    for file in (
        "checkpoints/.partial-draft/a",
        "checkpoints/.replaced-target/a",
        "rollouts/.partial-i.parquet",
    ):
        (run / file).write_text("x")
    (run / "metrics.jsonl").write_text("{}\n")
    StatusWriter(run / "status.json").reserve()
    tree = json.loads((run / "status.json").read_text()) | change
    (run / "status.json").write_text(json.dumps(tree))
    return run


def test_half_made_files_of_a_dead_run_go_and_its_results_stay(tmp_path: Path):
    dead = run_folder(tmp_path, "dead", pid_started=1)
    live = run_folder(tmp_path, "live")
    away = run_folder(tmp_path, "away", pid_started=1, host="elsewhere")
    lines = sweep_run_folders(tmp_path)
    assert [line.split(",")[0] for line in lines] == [
        f"removed {dead}/rollouts/.partial-i.parquet",
        f"removed {dead}/checkpoints/.partial-draft",
    ]
    assert sorted(path.relative_to(dead).as_posix() for path in dead.rglob("*")) == [
        "checkpoints",
        "checkpoints/target",
        "checkpoints/target/a",
        "metrics.jsonl",
        "rollouts",
        "status.json",
    ]
    for kept in (live, away):
        assert (kept / "rollouts" / ".partial-i.parquet").exists()
        assert (kept / "checkpoints" / ".replaced-target").exists()


def test_an_output_folder_with_other_things_in_it_is_left_alone(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".partial-mine").write_text("x")
    assert sweep_run_folders(tmp_path) == [] and sweep_run_folders(tmp_path / "missing") == []
    assert (tmp_path / "folder" / ".partial-mine").exists()
