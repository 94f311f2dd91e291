"""Workers of a private Ray are forks of one process that has imported what they need; others start as Ray would."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from rlhfspec.cluster.ray_start import forked_workers
from rlhfspec.cluster.ray_start.forked_workers import (
    begin_forking,
    begin_workers,
    forking,
    raylet_environment,
)
from rlhfspec.cluster.ray_start.origin import ROOT
from rlhfspec.core.proc_files import PROC

WORKER = """
import json, os, resource, sys
facts = {"argv": sys.argv, "torch": "torch" in sys.modules, "ray": "ray" in sys.modules, "folder": os.getcwd()}
if facts["torch"]:
    import numpy, random, torch
    facts |= {"threads": torch.get_num_threads(), "drawn": [numpy.random.rand(), random.random()]}
    forks = str(os.getppid())
    others = {*os.listdir(f"/proc/{forks}/task")} - {forks}
    facts["others"] = [open(f"/proc/{forks}/task/{other}/comm").read() for other in others]
    facts["limits"] = [resource.getrlimit(resource.RLIMIT_NOFILE)[0], open("/proc/self/oom_score_adj").read()]
    if facts["ray"]:
        from ray import NodeID
        facts["drawn"].append(NodeID.from_random().hex())
said = {name: os.environ.get(name) for name in ("SAID", "RAY_SAID")}
print(json.dumps(facts | said | {"beside": sys.path[0], "input": sys.stdin.read()}))
print("a warning", file=sys.stderr)
"""
ENDING = (
    "from rlhfspec.cluster.ray_start import forked_workers as one; one.begin_forking(); "
    "print(one._Forking.process.pid)"
)
PLAIN = "--serialized-runtime-env-context={}"


@pytest.fixture(scope="module")
def forks() -> Iterator[dict[str, str]]:
    """What a raylet is told whose workers are forked; another than that of the session's Ray."""
    kept = forked_workers._Forking.process, forked_workers._Forking.name
    forked_workers._Forking.process, forked_workers._Forking.name = None, ""
    with forking(print):
        yield raylet_environment()
    forked_workers._Forking.process, forked_workers._Forking.name = kept


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    (tmp_path / "setup_worker.py").write_text("import sys; print(sys.argv[1:]); print(sys.stdin.read())")
    (path := tmp_path / "worker.py").write_text(WORKER)
    return path


def run(worker: Path, context: str = PLAIN, **settings: Any) -> subprocess.CompletedProcess[str]:
    """A worker as a raylet starts it."""
    words = [sys.executable, forked_workers.__file__, str(worker), "--node=1", context, "--language=PYTHON"]
    return subprocess.run(words, input="here", capture_output=True, text=True, timeout=300, **settings)


def limit() -> None:
    """What a raylet has that `ray.init` starts, and gives what it starts as a worker."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (321, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    Path("/proc/self/oom_score_adj").write_text("654")


def is_alone(worker: Path, **settings: Any) -> bool:
    """Whether it is started as Ray starts it, with all that it is told."""
    ended = run(worker, **settings)
    told = [str(worker), "--node=1", settings.get("context", PLAIN), "--language=PYTHON"]
    return ended.stdout.splitlines() == [str(told), "here"]


@pytest.mark.slow
def test_a_worker_is_a_fork_with_the_words_files_folder_and_environment_that_it_was_started_with(
    worker: Path, tmp_path: Path, forks: dict[str, str]
) -> None:
    drawn = []
    for threads in (1, 3):
        variables = forks | {"RAY_SAID": "yes", "OMP_NUM_THREADS": "7"}
        of_actor = {"env_vars": {"SAID": "too", "OMP_NUM_THREADS": str(threads)}}
        context = f"--serialized-runtime-env-context={json.dumps(of_actor)}"
        ended = run(worker, context, cwd=tmp_path, env=variables, preexec_fn=limit)
        facts = json.loads(ended.stdout)
        drawn += facts.pop("drawn")
        assert facts == {
            "argv": [str(worker), "--node=1"],
            "torch": True,
            "ray": True,
            "folder": str(tmp_path),
            "threads": threads,
            # pyarrow's allocator, which has handlers of its own for forks; a lock of any other stays held in them
            "others": ["jemalloc_bg_thd\n"],
            "limits": [321, "654\n"],
            "SAID": "too",
            "RAY_SAID": "yes",
            "beside": str(tmp_path),
            "input": "here",
        }
        assert ended.stderr.startswith("a warning\n")
    assert len({*drawn}) == 6, "no two draw the same"
    # two that Ray ends before and after they have asked
    message = json.dumps([[str(worker)], variables, {}, "/", [321, 321], "654"])
    for words in (b"", message.encode()):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ended_soon, open(os.devnull) as nothing:
            ended_soon.connect("\0" + forks[forked_workers._NAME])
            if words:
                socket.send_fds(ended_soon, [words], [nothing.fileno()] * 3)
    assert json.loads(run(worker, env=variables).stdout)["torch"], "others are forked as before"
    # Ray's core has read another environment
    assert is_alone(worker, env=forks | {"RAY_SAID": "no"})


@pytest.mark.parametrize(
    "more",
    [
        {"py_executable": "/another/python"},
        {"command_prefix": ["cd", "elsewhere", "&&"]},
        {"override_worker_entrypoint": "/in/a/container.py"},
        {"env_vars": {"PYTHONPATH": "/another/tree"}},
        {"env_vars": {"LIBRARY": "${HOME}/lib"}},
    ],
)
def test_a_worker_that_ray_must_prepare_is_left_to_it(
    worker: Path, forks: dict[str, str], more: dict[str, Any]
) -> None:
    assert is_alone(worker, context=f"--serialized-runtime-env-context={json.dumps(more)}", env=forks)


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has neither started nor joined one, and forks for none."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(forked_workers._Forking, "process", None)
    monkeypatch.setattr(forked_workers._Forking, "name", "")


@pytest.mark.usefixtures("no_ray")
def test_nothing_is_forked_for_a_ray_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "3.1.4")
    with forking(print):
        assert forked_workers._Forking.process is None


def test_where_nobody_forks_a_worker_starts_as_it_would_have(worker: Path, forks: dict[str, str]) -> None:
    assert is_alone(worker, env=dict.fromkeys(forks, "nobody"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root may be somebody else")
def test_nobody_else_has_a_worker_run(forks: dict[str, str]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        os.seteuid(65534)
        try:
            other.connect("\0" + forks[forked_workers._NAME])
        finally:
            os.seteuid(0)
        other.settimeout(300)
        assert other.recv(1) == b"", "nothing was asked for, and it was closed"


def test_what_a_refused_run_began_ends_where_the_next_one_has_another_environment(
    no_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_workers("joined:6379")
    assert forked_workers._Forking.process is None
    begin_workers(None)
    first = begin_forking()
    begin_workers(None)
    assert begin_forking() is first
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    begin_workers(None)
    with forking(print):
        assert first.poll() is not None and begin_forking() is not first


def test_what_forks_ends_with_its_ray_though_it_is_stopped(no_ray: None) -> None:
    noted = SimpleQueue[str]()
    with forking(noted.put):
        process = begin_forking()
        process.send_signal(signal.SIGSTOP)
        said = f"are forks of (pid {process.pid}) was stopped: each actor that starts waits 120 s for it"
        assert said in noted.get(timeout=300.0)
    assert process.returncode == -signal.SIGKILL and noted.empty()


def test_a_worker_that_nobody_forks_in_time_starts_by_itself(worker: Path, tmp_path: Path) -> None:
    text = Path(forked_workers.__file__).read_text()
    assert "\nFORK_S = 120.0\n" in text
    (hasty := tmp_path / "hasty.py").write_text(text.replace("\nFORK_S = 120.0\n", "\nFORK_S = 0.5\n"))
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stopped,
        (tmp_path / "said").open("w") as said,
    ):
        # as of a process that is stopped: it is sent words and files, keeps them, and says nothing
        stopped.bind(f"\0{tmp_path}")
        stopped.listen(1)
        words = [sys.executable, str(hasty), str(worker), "--node=1", PLAIN]
        environment = {forked_workers._NAME: str(tmp_path)}
        subprocess.run(words, input="here", stdout=said, text=True, timeout=300, env=environment, check=True)
    assert (tmp_path / "said").read_text().splitlines() == [str([str(worker), "--node=1", PLAIN]), "here"]


def test_the_end_of_what_forks_is_told_at_once_and_workers_start_by_themselves(
    no_ray: None, worker: Path
) -> None:
    noted = SimpleQueue[str]()
    with forking(noted.put):
        begin_forking().kill()
        assert "are forks of ended (SIGKILL): the run goes on" in noted.get(timeout=300.0)
        assert is_alone(worker, env=raylet_environment())
    assert noted.empty()


def test_what_forks_ends_with_the_process_that_needs_it() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDING], cwd=ROOT, capture_output=True, text=True, check=True
    )
    ends_s = time.monotonic() + 120.0
    while (PROC / ended.stdout.strip()).exists():
        assert time.monotonic() < ends_s
        time.sleep(0.05)
