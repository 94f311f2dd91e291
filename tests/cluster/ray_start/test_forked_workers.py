"""Workers of a private Ray are forks of one process that has imported what they need; without it they start alone."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlhfspec.cluster.ray_start.forked_workers import begin_forking, worker_command
from rlhfspec.cluster.ray_start.origin import ROOT
from rlhfspec.core.proc_files import PROC

WORKER = """
import json, os, sys
facts = {"argv": sys.argv, "torch": "torch" in sys.modules, "ray": "ray" in sys.modules, "folder": os.getcwd()}
if facts["torch"]:
    import numpy, torch
    facts |= {"threads": torch.get_num_threads(), "drawn": numpy.random.rand()}
print(json.dumps(facts | {"said": os.environ.get("SAID"), "beside": sys.path[0], "input": sys.stdin.read()}))
print("a warning", file=sys.stderr)
"""
ENDING = (
    "from rlhfspec.cluster.ray_start import forked_workers as one; one.begin_forking(); "
    "print(one._Forking.process.pid)"
)


@pytest.fixture(autouse=True)
def _one_forks() -> None:
    begin_forking()


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    (path := tmp_path / "worker.py").write_text(WORKER)
    return path


def run(command: str, worker: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    words = [*shlex.split(command), str(worker), "--node=1"]
    return subprocess.run(words, input="here", capture_output=True, text=True, timeout=300, **settings)


@pytest.mark.slow
def test_a_worker_is_a_fork_with_the_words_files_folder_and_environment_that_it_was_started_with(
    worker: Path, tmp_path: Path
) -> None:
    drawn = []
    for threads in (1, 3):
        variables = {"SAID": "yes", "OMP_NUM_THREADS": str(threads)}
        ended = run(worker_command(), worker, cwd=tmp_path, env=variables)
        facts = json.loads(ended.stdout)
        drawn.append(facts.pop("drawn"))
        assert facts == {
            "argv": [str(worker), "--node=1"],
            "torch": True,
            "ray": False,
            "folder": str(tmp_path),
            "threads": threads,
            "said": "yes",
            "beside": str(tmp_path),
            "input": "here",
        }
        assert ended.stderr.startswith("a warning\n")
    assert drawn[0] != drawn[1]


def test_where_nobody_forks_a_worker_starts_as_it_would_have(worker: Path, tmp_path: Path) -> None:
    words = shlex.split(worker_command())
    facts = json.loads(run(shlex.join([*words[:-1], "nobody"]), worker, cwd=tmp_path).stdout)
    assert facts["argv"] == [str(worker), "--node=1"] and facts["input"] == "here" and not facts["torch"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may be somebody else")
def test_nobody_else_has_a_worker_run() -> None:
    *_, name = shlex.split(worker_command())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        os.seteuid(65534)
        try:
            other.connect(f"\0{name}")
        finally:
            os.seteuid(0)
        other.settimeout(300)
        assert other.recv(1) == b"", "nothing was asked for, and it was closed"


def test_what_forks_ends_with_the_process_that_needs_it() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDING], cwd=ROOT, capture_output=True, text=True, check=True
    )
    ends_s = time.monotonic() + 120.0
    while (PROC / ended.stdout.strip()).exists():
        assert time.monotonic() < ends_s
        time.sleep(0.05)
