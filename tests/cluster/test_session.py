"""Ray is started privately and ended whole, by Ctrl-C too."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.session import MIN_OBJECT_STORE_BYTES, free_port, object_store_bytes

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, sys, time
from core.config_io import config_from_dict
from cluster.session import ray_session
import ray
models = {"target": "demo", "draft": "demo"}
config = config_from_dict({"models": models, "data": {"task": "chain"}, "cluster": {"dashboard": False}})
with ray_session(config, "test") as session:
    @ray.remote(num_cpus=0.1)
    def where():
        import core
        return core.__file__
    assert session.is_local and session.namespace.startswith("rlhfspec-test-")
    print("worker", ray.get(where.remote()), flush=True)
    print("folder", ray._private.worker._global_node.get_temp_dir_path(), flush=True)
    time.sleep(600)
"""


def processes_of(folder: str) -> list[str]:
    """Command lines of processes that name the session's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if folder in line:
                found.append(line)
    return found


@pytest.mark.ray
@pytest.mark.slow
def test_ctrl_c_leaves_no_process_no_folder_and_an_untouched_home(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        # tests that run in a shell's background inherit that Ctrl-C is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert child.stdout is not None
        answers = dict(child.stdout.readline().split(maxsplit=1) for _ in range(2))
        folder = answers["folder"].strip()
        assert answers["worker"].strip() == str(ROOT / "core" / "__init__.py")
        assert processes_of(folder)
        child.send_signal(signal.SIGINT)
        child.wait(timeout=60)
    finally:
        child.kill()
    deadline = time.monotonic() + 60
    while processes_of(folder):
        assert time.monotonic() < deadline, processes_of(folder)
        time.sleep(0.2)
    assert not Path(folder).exists()
    assert list(tmp_path.iterdir()) == []


def test_the_object_store_fits_shared_memory_and_ray_s_minimum():
    assert MIN_OBJECT_STORE_BYTES <= object_store_bytes() <= 1 << 30


def test_a_free_port_is_one():
    assert 1024 <= free_port() <= 65535
