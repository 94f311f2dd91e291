"""Ray is started privately and ended whole, by SIGTERM too; a killed run is swept later."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rlhfspec.cluster.ray_start.ray_session
from rlhfspec.actors.remote import watch
from rlhfspec.actors.remote.watch import watching
from rlhfspec.cluster.folder.owner import processes_using
from rlhfspec.cluster.ray_start import machine
from rlhfspec.cluster.ray_start.ray_init import free_ports
from rlhfspec.cluster.ray_start.ray_session import (
    MIN_OBJECT_STORE_BYTES,
    PROCESS_ADDRESS_BYTES,
    check_local_ray,
    object_store_bytes,
    ray_session,
)
from rlhfspec.core.errors import NodeDied, PlacementError
from rlhfspec.core.settings.cluster import ClusterConfig

ROOT = Path(__file__).resolve().parents[3]

WAITING = """
import os, sys
from rlhfspec.core.settings.cluster import ClusterConfig
from rlhfspec.cluster.ray_start.ray_session import ray_session
import ray
def noted():
    # nothing has been cleaned up before
    print("noted", ray.is_initialized(), flush=True)
swept = []
with ray_session(ClusterConfig(dashboard=False), "test", on_sigterm=noted, note=swept.append) as session:
    @ray.remote(num_cpus=0.1)
    def forever():
        import time
        time.sleep(3600)
    print("folder", ray._private.worker._global_node.get_temp_dir_path(), flush=True)
    print("swept", *swept, flush=True)
    ray.get(forever.remote())
"""


@contextmanager
def waiting_session(temp: str) -> Iterator[tuple[subprocess.Popen, dict[str, str]]]:
    """A process in a wait of Ray's, its temporary folder and what it has swept."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}
    child = subprocess.Popen(
        [sys.executable, "-c", WAITING],
        env=environment | {"PYTHONPATH": str(ROOT), "TMPDIR": temp},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        lines = [child.stdout.readline().strip().partition(" ") for _ in range(2)]
        yield child, {name: text for name, _, text in lines}
    finally:
        child.kill()
        child.communicate()


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_run_leaves_no_folder_and_sigterm_is_noted_and_exits_with_143():
    # short: sockets of Ray live in it
    temp = tempfile.mkdtemp(prefix="s-")
    try:
        with waiting_session(temp) as (child, said):
            dead = Path(said["folder"]).parent
            assert dead.parent == Path(temp) and said["swept"] == ""
            child.kill()
            child.wait()
        deadline = time.monotonic() + 300
        while dead.exists() or processes_using(dead):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        with waiting_session(temp) as (child, said):
            assert said["swept"] == ""
            child.send_signal(signal.SIGTERM)
            output, _ = child.communicate(timeout=120)
        assert output == "noted True\n" and child.returncode == 143
        assert not Path(said["folder"]).parent.exists()
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def test_the_object_store_fits_shared_memory_and_ray_s_minimum():
    assert MIN_OBJECT_STORE_BYTES <= object_store_bytes() <= 1 << 30
    shared = machine.shared_memory_bytes()
    assert shared is not None and object_store_bytes(1 << 50) == max(MIN_OBJECT_STORE_BYTES, shared * 9 // 10)


def test_a_free_port_is_in_the_unprivileged_range():
    assert 1024 <= free_ports(1)[0] <= 65535


@pytest.mark.parametrize("wanted", [1, -5, 0, 1 << 60])
def test_an_object_store_that_cannot_be_is_refused_with_the_sizes_that_can(wanted):
    with pytest.raises(
        PlacementError, match=rf"object_store_bytes {wanted} cannot be had: expected at least"
    ):
        check_local_ray(ClusterConfig(object_store_bytes=wanted))
    check_local_ray(ClusterConfig(object_store_bytes=MIN_OBJECT_STORE_BYTES))


def test_few_addresses_for_a_process_are_refused_before_ray_ends_it(monkeypatch):
    store = 1 << 30
    for limit in (PROCESS_ADDRESS_BYTES + store, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        check_local_ray(ClusterConfig(object_store_bytes=store))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (4_000_000 << 10, resource.RLIM_INFINITY))
    with pytest.raises(
        PlacementError, match=r"limited to 3.8 GiB \(ulimit -v\): expected at least 5.0, of which"
    ):
        check_local_ray(ClusterConfig(object_store_bytes=store))


@pytest.mark.parametrize("port", [99999, -1, 0])
def test_an_invalid_port_is_refused(port):
    with pytest.raises(PlacementError, match=f"dashboard_port must be 1 to 65535, got {port}"):
        check_local_ray(ClusterConfig(dashboard_port=port))
    check_local_ray(ClusterConfig(dashboard_port=port, dashboard=False))


def test_a_port_in_use_is_refused_and_a_free_one_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PlacementError, match=f"dashboard_port {port} cannot be taken .*in use"):
            check_local_ray(ClusterConfig(dashboard_port=port))
    check_local_ray(ClusterConfig(dashboard_port=free_ports(1)[0]))


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_unreachable_cluster_address_is_refused_at_once(scheme, monkeypatch):
    monkeypatch.setattr(rlhfspec.cluster.ray_start.ray_session.ray, "is_initialized", lambda: False)
    address = f"{scheme}127.0.0.1:{free_ports(1)[0]}"
    with (
        pytest.raises(PlacementError, match=r"cannot reach the Ray cluster at .*refused"),
        ray_session(ClusterConfig(address=address), "test"),
    ):
        pass


def test_a_slow_start_of_ray_says_what_it_waits_for(monkeypatch):
    said = threading.Event()

    def start(**settings):
        assert said.wait(60.0)
        raise ValueError("too slow")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    monkeypatch.setattr(rlhfspec.cluster.ray_start.ray_session.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(rlhfspec.cluster.ray_start.ray_session, "start_twice", start)
    monkeypatch.setattr(rlhfspec.cluster.ray_start.ray_session.ray, "shutdown", lambda: None)
    notes = []
    with (
        pytest.raises(NodeDied, match="too slow"),
        watching(lambda text: (notes.append(text), said.set())),
        ray_session(ClusterConfig(), "test"),
    ):
        pass
    assert notes == ["waiting for Ray's own processes, each for 180 s at most"]


def test_a_failed_start_of_ray_is_one_placement_error_and_leaves_no_folder(tmp_path, monkeypatch):
    def fail(**settings):
        raise ValueError("no room\nfor a store")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setattr(rlhfspec.cluster.ray_start.ray_session.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(rlhfspec.cluster.ray_start.ray_session.ray, "init", fail)
    monkeypatch.setattr(rlhfspec.cluster.ray_start.ray_session.ray, "shutdown", lambda: None)
    made = []
    make = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **names: made.append(make(**names)) or made[-1])
    with (
        pytest.raises(
            NodeDied, match=r"cannot start Ray on this machine: no room for a store; start again, .*/dev/shm"
        ),
        ray_session(ClusterConfig(), "test"),
    ):
        pass
    assert made and not Path(made[0]).exists()
