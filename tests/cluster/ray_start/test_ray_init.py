"""Ray is waited for on a busy machine and started once more; what it leaves ends, with its folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from folder_user import user_of

from rlhfspec.cluster.folder.owner import processes_using
from rlhfspec.cluster.ray_start import ray_init
from rlhfspec.cluster.ray_start.ray_init import StartFailed, start_twice
from rlhfspec.cluster.ray_start.ray_session import note_dashboard

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _the_sessions_ray_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that failed shuts Ray down before the next: here the one that all tests share."""
    monkeypatch.setattr(ray_init.ray, "shutdown", lambda: None)


@pytest.mark.parametrize(
    "failure",
    [
        StartFailed("raylet ended while it was coming up"),
        Exception("The current node timed out during startup. This could happen because"),
    ],
)
def test_ray_that_did_not_come_up_in_time_is_started_once_more_and_nothing_of_the_first_try_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failure: Exception
):
    tries, shut = [], []
    with user_of(tmp_path / "session") as left:

        def start(**settings):
            ports = ray_init.parameter.RayParams(num_cpus=1)
            told = (ports.metrics_agent_port, ports.dashboard_agent_listen_port, ports.runtime_env_agent_port)
            tries.append((settings, processes_using(tmp_path), told))
            if len(tries) < 2:
                raise failure
            return "context"

        monkeypatch.setattr(ray_init.ray, "init", start)
        monkeypatch.setattr(ray_init.ray, "shutdown", lambda: shut.append(True))
        assert start_twice(folder=tmp_path, address="local") == "context" and shut == [True]
        # an agent that must tell its ports is waited for 15 s alone: it is told them
        for settings, _, ports in tries:
            assert len({*ports, settings.pop("_metrics_export_port")}) == 4 and None not in ports
            assert settings == {"address": "local", "_temp_dir": str(tmp_path)}
        assert [running for _, running, _ in tries] == [[left.pid], []]
        assert ray_init.parameter.RayParams(num_cpus=1).metrics_agent_port is None


def test_ray_of_another_version_starts_as_it_does_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    own, found = (ray_init.services.start_raylet, ray_init.parameter.RayParams), []

    def start(**settings):
        found.append((ray_init.services.start_raylet, ray_init.parameter.RayParams))

    monkeypatch.setattr(ray_init.ray, "init", start)
    start_twice(folder=tmp_path)
    monkeypatch.setattr(ray_init.forked_workers, "KNOWN_RAY", "3.1.")
    start_twice(folder=tmp_path)
    assert found[0] != own and found[1] == own


def test_another_failure_of_the_start_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(ray_init.ray, "init", lambda **settings: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        start_twice(folder=tmp_path, address="local")


def asked_by_ray(monkeypatch: pytest.MonkeyPatch, folder: Path, answer: Callable[[], object]) -> object:
    """What `ray.init` gets that asks, as it does, for its node; how Ray asks is `answer`."""
    before = ray_init.services.get_node
    monkeypatch.setattr(ray_init.services, "get_node", lambda address, node: answer())
    monkeypatch.setattr(
        ray_init.ray, "init", lambda **settings: ray_init.services.get_node("127.0.0.1:1", "node")
    )
    try:
        return start_twice(folder=folder)
    finally:
        monkeypatch.setattr(ray_init.services, "get_node", before)


def test_a_node_that_is_not_there_yet_is_asked_for_until_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    clock, asked = [0.0], []
    monkeypatch.setattr(ray_init.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ray_init.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + 20.0))

    def answer() -> object:
        asked.append(clock[0])
        if clock[0] < 160.0:
            raise RuntimeError("not yet")
        return {"node": 1}

    assert asked_by_ray(monkeypatch, tmp_path, answer) == {"node": 1}
    assert asked[-1] == 160.0 and len(asked) == 9


def test_a_node_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    clock = [0.0]
    monkeypatch.setattr(ray_init.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ray_init.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + 20.0))

    def answer() -> object:
        raise RuntimeError("not yet")

    with pytest.raises(RuntimeError, match="not yet"):
        asked_by_ray(monkeypatch, tmp_path, answer)
    assert ray_init.START_S < clock[0] < 2 * ray_init.START_S


def end_a_raylet() -> None:
    """Start one, as Ray does, that ends at once."""
    ray_init.services.start_ray_process(["/bin/true"], "raylet", fate_share=False).process.wait()


def test_a_raylet_that_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def answer() -> object:
        end_a_raylet()
        raise RuntimeError("not yet")

    with pytest.raises(StartFailed, match="raylet ended while it was coming up"):
        asked_by_ray(monkeypatch, tmp_path, answer)


def test_a_raylet_that_ended_in_the_first_try_is_none_of_the_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    tries, asked = [], []

    def answer() -> object:
        asked.append(len(tries))
        if len(tries) == 1:
            end_a_raylet()
        if asked.count(2) < 3:
            raise RuntimeError("not yet")
        return {"node": 2}

    def start(**settings):
        tries.append(settings)
        return ray_init.services.get_node("127.0.0.1:1", "node")

    monkeypatch.setattr(ray_init.services, "get_node", lambda address, node: answer())
    monkeypatch.setattr(ray_init.ray, "init", start)
    assert start_twice(folder=tmp_path) == {"node": 2} and asked.count(2) == 3


@pytest.mark.parametrize("command", [["false"], ["sleep", "600"]])
def test_a_dashboard_that_ended_is_told(monkeypatch: pytest.MonkeyPatch, command: list[str]):
    with subprocess.Popen(command) as process:
        node = SimpleNamespace(
            all_processes={"dashboard": [SimpleNamespace(process=process)]},
            get_logs_dir_path=lambda: "/of/ray",
        )
        monkeypatch.setattr(ray_init.ray._private.worker, "_global_node", node)
        notes: list[str] = []
        if command == ["false"]:
            process.wait()
        note_dashboard(notes.append)
        process.kill()
    told = "Ray's dashboard ended with exit code 1, and the run goes on without it: see /of/ray"
    assert notes == ([told] if command == ["false"] else [])


@pytest.mark.ray
def test_without_a_dashboard_there_is_no_process_for_it(local_ray: None):
    node = ray_init.ray._private.worker._global_node
    assert node.all_processes.keys() == {"gcs_server", "raylet"} and not node.webui_url


ENDING = """
import os, signal, sys
from rlhfspec.core.settings.cluster import ClusterConfig
from rlhfspec.cluster.ray_start.ray_session import ray_session
import ray
with ray_session(ClusterConfig(dashboard=False), "test") as session:
    node = ray._private.worker._global_node
    print("folder", node.get_temp_dir_path(), flush=True)
    assert os.stat(os.path.dirname(node.get_temp_dir_path())).st_mode & 0o777 == 0o700
    os.kill(node.all_processes[sys.argv[1]][0].process.pid, signal.SIGKILL)
    @ray.remote(num_cpus=0.1)
    def one():
        return 1
    ray.get(one.remote(), timeout=120)
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("process", ["raylet"])
def test_no_folder_stays_behind_where_the_raylet_dies(process: str):
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}
    with tempfile.TemporaryDirectory(prefix="d-", dir="/tmp") as temp:
        done = subprocess.run(
            [sys.executable, "-c", ENDING, process],
            env=environment | {"PYTHONPATH": str(ROOT), "TMPDIR": temp},
            capture_output=True,
            text=True,
            timeout=600,
        )
        folder = Path(done.stdout.split()[1]).parent
        assert done.returncode != 0 and folder.parent == Path(temp)
        ends_s = time.monotonic() + 60.0
        while folder.exists() and time.monotonic() < ends_s:
            time.sleep(0.2)
        assert not folder.exists(), done.stderr[-2000:]
        assert processes_using(folder) == []
