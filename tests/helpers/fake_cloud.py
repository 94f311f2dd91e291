"""A Ray head with its real autoscaler over fake nodes on this machine; ends without touching any other Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

HEAD = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
START_S = 120.0


@contextmanager
def fake_cloud(folder: Path, *, cpus: int, most: int, idle_s: float, port: int) -> Iterator[str]:
    """Yield the address of a head with so many CPUs that may get `most` more nodes of the same size.

    Args:
        folder: for Ray's files; a short path, for its sockets.
        cpus: of each node.
        most: worker nodes.
        idle_s: after so long without an actor a node goes.
        port: of the head; free.
    """
    import ray

    address = f"{ray.util.get_node_ip_address()}:{port}"
    store = {"object_store_memory": 80 << 20}
    config = {
        "cluster_name": "fake",
        "max_workers": most,
        "idle_timeout_minutes": idle_s / 60.0,
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": address,
            "head_node_id": HEAD,
            "launch_multiple": True,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": cpus, **store}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": {"CPU": cpus, **store},
                "node_config": {},
                "min_workers": 0,
                "max_workers": most,
            },
        },
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "auth": {},
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
        "file_mounts": {},
        "initialization_commands": [],
        "cluster_synced_files": [],
    }
    path = folder / "cloud.yaml"
    path.write_text(yaml.safe_dump(config))
    environment = os.environ | {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
        "RAY_CLOUD_INSTANCE_ID": HEAD,
        "RAY_NODE_TYPE_NAME": "ray.head.default",
        "RAY_TMPDIR": str(folder),
    }
    start = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
        f"--num-cpus={cpus}", f"--object-store-memory={80 << 20}", "--include-dashboard=false",
        f"--temp-dir={folder}", f"--autoscaling-config={path}",
    ]  # fmt: skip
    with (folder / "head.log").open("wb") as log:
        head = subprocess.Popen(start, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            _wait_for_head(head, address, folder)
            yield address
        finally:
            head.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                head.wait(20.0)
            _end_all(folder)


def _wait_for_head(head: subprocess.Popen, address: str, folder: Path) -> None:
    from ray._raylet import GcsClient

    ends_s = time.monotonic() + START_S
    while True:
        try:
            GcsClient(address=address).get_all_node_info()
            if "Ray runtime started" in (folder / "head.log").read_text():
                return
        except Exception:
            if head.poll() is not None or time.monotonic() > ends_s:
                raise AssertionError((folder / "head.log").read_text()) from None
        assert head.poll() is None and time.monotonic() < ends_s, (folder / "head.log").read_text()
        time.sleep(0.5)


def _end_all(folder: Path) -> None:
    """Whatever of this cloud still lives: fake nodes outlive the autoscaler that made them."""
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            pid = int(place.name)
            if pid != os.getpid() and f"{folder}/session_" in (place / "cmdline").read_text(errors="replace"):
                os.kill(pid, signal.SIGKILL)
