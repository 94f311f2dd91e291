"""Ray's sockets fit: below the given temporary folder, else below a short one, which is said."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlhfspec.cluster.ray_start import private_folder
from rlhfspec.cluster.ray_start.private_folder import (
    LONGEST,
    temporary_base,
    temporary_notes,
)
from rlhfspec.cluster.ray_start.ray_session import check_local_ray
from rlhfspec.core.errors import PlacementError
from rlhfspec.core.settings.cluster import ClusterConfig

ROOT = Path(__file__).resolve().parents[3]


def at(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm", "/" + "a" * (LONGEST - 1)])
def test_a_folder_that_is_short_enough_is_taken_without_a_word(monkeypatch: pytest.MonkeyPatch, folder: str):
    at(monkeypatch, Path(folder))
    assert temporary_base() == Path(folder) and temporary_notes() == []


@pytest.mark.parametrize("num_bytes", [LONGEST + 1, 60, 200])
def test_a_longer_one_is_left_for_a_short_one_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int
):
    long = Path("/" + "é" * ((num_bytes - 1) // 2) + "a" * ((num_bytes - 1) % 2))
    at(monkeypatch, long)
    assert temporary_base() == Path("/tmp")
    (line,) = temporary_notes()
    assert line == (
        f"Ray's temporary files lie in /tmp: its sockets do not fit below {long} (TMPDIR: {num_bytes} bytes, "
        f"expected at most {LONGEST})"
    )
    check_local_ray(ClusterConfig())


def test_the_longest_folder_that_is_taken_holds_ray_s_longest_socket():
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        base = Path(short) / ("a" * (LONGEST - len(short) - 1))
        # as ray.init names them, with the largest number that a process may have
        sockets = (
            base / "rlhfspec-ray-12345678" / "r" / "session_2026-01-01_00-00-00_000000_4194304" / "sockets"
        )
        sockets.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(sockets / "plasma_store"))


def test_where_no_short_folder_can_be_written_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    at(monkeypatch, tmp_path / ("long" * 20))
    monkeypatch.setattr(private_folder, "SHORT", (tmp_path / "none", tmp_path / "neither"))
    with pytest.raises(PlacementError, match=r"too long for Ray's sockets.*cannot be written to; set TMPDIR"):
        temporary_base()


SCRIPT = """
import socket, tempfile, time
from rlhfspec.core.settings.cluster import ClusterConfig
from rlhfspec.cluster.ray_start.ray_session import ray_session
import ray
notes = []
with ray_session(ClusterConfig(), "test", note=notes.append) as session:
    @ray.remote(num_cpus=0.1)
    def where():
        return tempfile.gettempdir()
    print(ray._private.worker._global_node.get_temp_dir_path())
    print(ray.get(where.remote()))
    # nobody else waits for it
    while socket.socket().connect_ex(("127.0.0.1", int(session.dashboard_url.rpartition(":")[2]))):
        time.sleep(0.2)
    print(session.dashboard_url)
    print(*notes, sep="|")
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [70, 150])
def test_ray_and_its_dashboard_come_up_whatever_the_length_of_tmpdir(tmp_path: Path, num_bytes: int):
    temp = tmp_path / ("t" * max(1, num_bytes - len(str(tmp_path)) - 1))
    temp.mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temp)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    folder, of_workers, url, notes = done.stdout.splitlines()
    assert Path(folder).parent.parent == Path("/tmp") and not Path(folder).parent.exists()
    assert Path(of_workers) == temp
    assert url.startswith("http://127.0.0.1:") and f"do not fit below {temp}" in notes
    # torch's, made while it is imported
    assert [path.name for path in temp.iterdir() if not path.name.startswith("torchinductor_")] == []
