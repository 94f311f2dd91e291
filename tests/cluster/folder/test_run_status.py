"""`status.json` can be trusted: written in place, read whole, and it tells who writes and whether he lives."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder import run_status
from rlhfspec.cluster.folder.owner import ProcessIdentity
from rlhfspec.cluster.folder.run_status import (
    STATUS_BYTES,
    Status,
    StatusWriter,
    describe_status,
    may_be_running,
    read_status,
)
from rlhfspec.core.errors import StorageError

NOW = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "status.json"


def started(path: Path) -> StatusWriter:
    writer = StatusWriter(path)
    writer.reserve()
    return writer


def test_the_status_has_state_pid_host_iteration_phase_and_heartbeat(path: Path):
    writer = started(path)
    writer.progress(3, "generate")
    status = read_status(path)
    assert status["state"] == "running" and status["reason"] == "" and status["schema_version"] == 1
    assert status["pid"] == os.getpid() and status["host"]
    assert status["iteration"] == 3 and status["phase"] == "generate"
    age = datetime.now(UTC) - datetime.fromisoformat(status["heartbeat"])
    assert timedelta(seconds=-2) < age < timedelta(minutes=5)
    writer.set("failed", "because")
    status = read_status(path)
    assert (status["state"], status["reason"], status["iteration"]) == ("failed", "because", 3)


def test_a_status_of_another_version_is_not_read_as_one_of_ours(path: Path):
    path.write_text('{"state": "finished", "schema_version": 2}')
    assert read_status(path) == {
        "state": "unknown",
        "reason": "status.json has schema version 2, this version reads 1",
    }


@pytest.mark.parametrize(
    "reason", ["", "x" * 9000, "\N{OWL}" * 9000, '"\\\n' * 3000], ids=["none", "x", "owl", "odd"]
)
def test_the_file_keeps_its_size_whatever_the_reason(path: Path, reason: str):
    writer = started(path)
    inode = path.stat().st_ino
    writer.set("failed", reason)
    assert path.stat().st_size == STATUS_BYTES and path.stat().st_ino == inode
    kept = read_status(path)["reason"]
    assert reason.startswith(kept) and len(kept) >= min(len(reason), 250)


def test_the_final_state_is_written_on_a_full_disk(path: Path, monkeypatch):
    """Only calls that need new room fail: the file is neither made anew nor made longer."""
    writer = started(path)
    really = os.pwrite

    def in_place_only(file: int, data: bytes, offset: int) -> int:
        if offset + len(data) > os.fstat(file).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really(file, data, offset)

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_status.os, "pwrite", in_place_only)
    monkeypatch.setattr(run_status.os, "write", full)
    writer.set("failed", "the disk is full")
    assert read_status(path)["reason"] == "the disk is full"


def test_a_disk_that_takes_nothing_is_an_error_for_states_and_none_for_progress(path: Path, monkeypatch):
    writer = started(path)

    def full(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(run_status.os, "pwrite", full)
    writer.progress(1, "update")
    with pytest.raises(StorageError, match=r"cannot write .*status\.json"):
        writer.set("finished")


def test_the_heartbeat_goes_on_by_itself_and_ends_with_the_state(path: Path, monkeypatch):
    monkeypatch.setattr(run_status, "HEARTBEAT_S", 0.01)
    writer = started(path)
    written: list[float] = []
    twice = threading.Event()
    really = os.pwrite

    def seen(file: int, data: bytes, offset: int) -> int:
        written.append(time.monotonic())
        if len(written) >= 2:
            twice.set()
        return really(file, data, offset)

    monkeypatch.setattr(run_status.os, "pwrite", seen)
    with writer.beating():
        assert twice.wait(60)
        writer.set("interrupted", "x")
        writer.set("interrupted", "y")
        count = len(written)
        time.sleep(0.1)
        assert len(written) <= count + 1, "one beat may have been on its way"
    assert read_status(path)["reason"] == "y"
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_a_state_that_a_signal_handler_sets_within_a_write_stays(path: Path, monkeypatch):
    writer = started(path)
    really, calls = os.pwrite, []

    def interrupted(file: int, data: bytes, offset: int) -> int:
        calls.append(data)
        if len(calls) == 1:
            # as a handler would, on the same thread, before these older bytes reach the file
            writer.set("interrupted", "SIGTERM")
        return really(file, data, offset)

    monkeypatch.setattr(run_status.os, "pwrite", interrupted)
    writer.progress(5, "update")
    status = read_status(path)
    assert (status["state"], status["reason"], status["iteration"]) == ("interrupted", "SIGTERM", 5)


def test_a_torn_read_is_read_again(path: Path, monkeypatch):
    started(path).set("finished")
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    monkeypatch.setattr(run_status.time, "sleep", lambda _: path.write_bytes(whole))
    assert read_status(path)["state"] == "finished"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", '{"state": 3}', "[" * 100_000], ids=range(7))
def test_a_damaged_file_is_said_to_be_one(path: Path, text: str):
    path.write_text(text)
    assert read_status(path) == {"state": "unknown", "reason": "status.json is damaged"}


def test_an_older_file_of_two_fields_is_read_and_described(path: Path):
    path.write_text(json.dumps({"state": "running", "reason": ""}) + "\n")
    assert describe_status(read_status(path)) == ["state running"]
    assert describe_status({"state": "failed", "reason": "so"}) == ["state failed: so"]
    path.unlink()
    assert read_status(path)["state"] == "unknown"


def running(who: ProcessIdentity, *, age_s: float) -> Status:
    heartbeat = (NOW - timedelta(seconds=age_s)).isoformat()
    tree = {"state": "running", "reason": "", "iteration": 2, "phase": "update", "heartbeat": heartbeat}
    return tree | who.as_tree()  # type: ignore[return-value]


def test_running_stale_and_stopped_are_told_apart():
    me = ProcessIdentity.of_this()
    (line,) = describe_status(running(me, age_s=3), now=NOW)
    assert (
        line
        == f"state running: process {me.pid} on {me.host} (last heartbeat 3 s ago, in iteration 3, update)"
    )
    line, advice = describe_status(running(me, age_s=300), now=NOW)
    assert line.startswith(f"state stale: process {me.pid} on {me.host} exists but gives no sign of life")
    assert "5 min ago" in line and "kill -CONT" in advice

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        started = ProcessIdentity.of_this().as_tree() | {"pid": child.pid, "pid_started": None}
        living = ProcessIdentity(**started)
        assert describe_status(running(living, age_s=3), now=NOW)[0].startswith("state running")
    finally:
        child.kill()
        child.wait()
    line, advice = describe_status(running(living, age_s=3), now=NOW)
    assert line.startswith(
        f"state stale: status.json says running, but process {child.pid} on {me.host} is gone"
    )
    assert "in iteration 3, update" in line and "what was finished is kept" in advice

    other_start = ProcessIdentity(**me.as_tree() | {"pid_started": 1})
    assert "is gone" in describe_status(running(other_start, age_s=3), now=NOW)[0], "its number is used again"


def test_a_run_that_is_stopping_runs_until_its_process_is_gone():
    stopping: Status = running(ProcessIdentity.of_this(), age_s=3) | {
        "state": "stopping",
        "reason": "SIGTERM",
    }  # type: ignore[assignment]
    (line,) = describe_status(stopping, now=NOW)
    assert line.startswith("state stopping: process ") and line.endswith(", SIGTERM")
    assert may_be_running(stopping, now=NOW)
    gone: Status = stopping | {"pid_started": 1}  # type: ignore[assignment]
    (line,) = describe_status(gone, now=NOW)
    assert line.startswith("state interrupted: SIGTERM; process ") and "was killed before" in line
    assert not may_be_running(gone, now=NOW)


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"pid_namespace": "pid:[1]"}], ids=str)
def test_a_process_of_another_host_or_namespace_is_judged_by_its_heartbeat(change: dict[str, str]):
    away = ProcessIdentity(**ProcessIdentity.of_this().as_tree() | {"pid": 2**22 + 1} | change)
    assert not away.is_gone
    assert describe_status(running(away, age_s=30), now=NOW)[0].startswith("state running")
    line, advice = describe_status(running(away, age_s=7200), now=NOW)
    assert "nothing was heard of" in line and "2 h ago" in line
    assert f"look on {away.host}" in advice


@pytest.mark.parametrize("heartbeat", ["", "yesterday", None, 3, "2026-01-02T12:00:00"])
def test_an_invalid_heartbeat_is_no_traceback(heartbeat: object):
    status = running(ProcessIdentity.of_this(), age_s=0) | {"heartbeat": heartbeat}
    assert describe_status(status, now=NOW)[0] == "state running"  # type: ignore[arg-type]


def test_show_says_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.yaml").write_text("")
    gone = ProcessIdentity(**ProcessIdentity.of_this().as_tree() | {"pid_started": 1})
    (tmp_path / "status.json").write_text(json.dumps(running(gone, age_s=0)))
    assert main(["show", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("state stale: status.json says running, but process") and "no iteration" in out


def test_a_process_that_ended_unasked_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    who = replace(ProcessIdentity.of_this(), pid=child.pid, pid_started=None)
    assert not who.is_gone
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and still in the table
    assert who.is_gone
    child.wait()
