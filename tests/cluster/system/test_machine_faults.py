"""Errors of the machine are one line; errors that may be ours keep their traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.observe.run_record import RunRecord
from rlhfspec.cluster.ray_start.origin import ROOT
from rlhfspec.cluster.system.machine_faults import explain_os_error


def raised(error: OSError) -> OSError:
    """The error with a traceback."""
    try:
        raise error
    except OSError as caught:
        return caught


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "free some space"), (errno.EACCES, "get the right"), (errno.EMFILE, "ulimit -n")],
)
def test_the_machines_faults_are_told_with_place_and_advice(number: int, advice: str) -> None:
    fault = explain_os_error(raised(OSError(number, os.strerror(number), "/some/file")))
    assert fault is not None and fault.exit_code == 1
    assert fault.text.startswith(f"{os.strerror(number)}: /some/file (in ") and advice in fault.text


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "x"), FileExistsError(errno.EEXIST, "x"), OSError()]
)
def test_errors_that_may_be_bugs_are_not_explained(error: OSError) -> None:
    assert explain_os_error(raised(error)) is None


def test_a_folder_that_is_gone_from_under_a_command_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone, config = tmp_path / "gone", tmp_path / "run.yaml"
    config.write_text("models: {target: demo, draft: demo}\ndata: {task: chain}\n")
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["check", "--config", str(config)]) == 2
    assert "the folder that this command was called in is gone" in capsys.readouterr().err


def test_a_pipe_that_is_not_our_output_keeps_its_traceback() -> None:
    assert explain_os_error(raised(BrokenPipeError(errno.EPIPE, "of some library"))) is None


def test_the_command_line_tells_the_machines_faults_and_raises_bugs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(error: Exception) -> None:
        def read(*_: object) -> int:
            raise error

        monkeypatch.setattr(RunRecord, "read", read)

    failing(PermissionError(errno.EACCES, "Permission denied", "/some/file"))
    assert main(["show", "x"]) == 1
    err = capsys.readouterr().err
    assert (
        err.startswith("error: Permission denied: /some/file (in cluster/commands/show.py:")
        and err.count("\n") == 1
    )
    for bug in (FileNotFoundError(errno.ENOENT, "x"), KeyError("x"), ValueError("x")):
        failing(bug)
        with pytest.raises(type(bug)):
            main(["show", "x"])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("")
    return tmp_path


def show_into(output: int, run_dir: Path) -> tuple[int, str]:
    """Exit code and errors of `rlhfspec show` with `output` for its standard output."""
    argv = [sys.executable, "-m", "rlhfspec.cluster.cli", "show", str(run_dir)]
    answer = subprocess.run(argv, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True)
    return answer.returncode, answer.stderr


def test_a_name_that_the_terminal_cannot_spell_is_printed_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "über"
    folder.mkdir()
    (folder / "config.yaml").write_text("")
    argv = [sys.executable, "-m", "rlhfspec.cluster.cli", "show", str(folder)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    answer = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "\\xfcber" in answer.stdout


def test_output_that_nobody_reads_ends_with_one_line(run_dir: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert show_into(writer, run_dir) == (
            141,
            "error: nobody reads the output any more (closed pipe); stopped\n",
        )
    finally:
        os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_a_full_disk_under_the_output_ends_with_one_line(run_dir: Path) -> None:
    with open("/dev/full", "w") as full:
        code, err = show_into(full.fileno(), run_dir)
    assert code == 1
    assert err.startswith("error: No space left on device (in cluster/") and err.count("\n") == 1
