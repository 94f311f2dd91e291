"""A private Ray lets in who can read its token, and nobody else, and is ended whole by Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from rlhfspec.cluster.ray_start.private_folder import environment, make_token, note_address, token_of
from rlhfspec.cluster.ray_start.ray_session import _LOCAL_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[3]

WAITING = """
import json, os, time
from rlhfspec.core.settings.cluster import ClusterConfig
from rlhfspec.cluster.ray_start.ray_session import ray_session
import ray
try:
    with ray_session(ClusterConfig(), "test") as session:
        @ray.remote(num_cpus=0.1)
        def where():
            import rlhfspec.core
            return rlhfspec.core.__file__
        assert session.is_local and session.namespace.startswith("rlhfspec-test-")
        print(json.dumps({
            "url": session.dashboard_url,
            "token": str(session.token_file),
            "gcs": ray.get_runtime_context().gcs_address,
            "folder": ray._private.worker._global_node.get_temp_dir_path(),
            "worker": ray.get(where.remote()),
        }), flush=True)
        time.sleep(600)
except KeyboardInterrupt:
    pass
print(os.environ.get("RAY_AUTH_MODE"), os.environ.get("RAY_AUTH_TOKEN"), os.environ.get("RAY_AUTH_TOKEN_PATH"))
"""


USING = """
import os, sys
from pathlib import Path
from ray._raylet import AuthenticationMode, get_authentication_mode
from rlhfspec.cluster.ray_start.private_folder import make_token, using_token
before = dict(os.environ)
print(get_authentication_mode() == AuthenticationMode.TOKEN)
with using_token(make_token(Path(sys.argv[1]))):
    print(get_authentication_mode() == AuthenticationMode.TOKEN)
    assert "RAY_AUTH_TOKEN" not in os.environ
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == sys.argv[1] + "/auth_token"
assert dict(os.environ) == before
print(get_authentication_mode() == AuthenticationMode.TOKEN)
"""


CLAIMING = """
import sys
from pathlib import Path
from rlhfspec.cluster.folder.leftovers import claim
claim(Path(sys.argv[1]))
"""


# By a process of its own: gRPC's threads and this one's forks do not go together.
ASKING = """
import sys
import grpc
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
address, *tokens = sys.argv[1:]
for token in tokens:
    shown = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        head = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        try:
            head.GetAllNodeInfo(gcs_service_pb2.GetAllNodeInfoRequest(), timeout=60, metadata=shown)
            print("OK")
        except grpc.RpcError as error:
            print(error.code().name)
"""


def nodes(address: str, *tokens: str) -> list[str]:
    """What the cluster's head says to who asks for its nodes with each, as every driver does first."""
    argv = [sys.executable, "-c", ASKING, address, *tokens]
    asked = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    return asked.stdout.split() or [asked.stderr]


def answer(url: str, token: str | None, entrypoint: str | None = None) -> tuple[int, str]:
    """Status and text of the job API: the list of jobs, or of one that is submitted."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    data = None if entrypoint is None else json.dumps({"entrypoint": entrypoint}).encode()
    request = urllib.request.Request(f"{url}/api/jobs/", data, headers | {"Content-Type": "application/json"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def await_dashboard(url: str) -> None:
    """Ray does not wait for it."""
    ends_s = time.monotonic() + 180.0
    while True:
        try:
            return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))).close()
        except ConnectionRefusedError:
            assert time.monotonic() < ends_s
            time.sleep(0.2)


@contextmanager
def private_ray(temp: str, **more: str) -> Iterator[tuple[subprocess.Popen, dict[str, str]]]:
    names = ("RAY_AUTH_MODE", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    child = subprocess.Popen(
        [sys.executable, "-c", WAITING],
        env=kept | {"PYTHONPATH": str(ROOT), "TMPDIR": temp} | more,
        stdout=subprocess.PIPE,
        text=True,
        # tests that run in a shell's background inherit that Ctrl-C is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert child.stdout is not None
        yield child, json.loads(child.stdout.readline())
    finally:
        child.kill()
        child.communicate()


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


def listeners(pid: int) -> set[str]:
    """Addresses that a process and all below it listen on."""
    root = psutil.Process(pid)
    found = set()
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.Error):
            sockets = process.net_connections(kind="tcp")
            found |= {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
    return {address.removeprefix("::ffff:") for address in found}


@pytest.mark.ray
@pytest.mark.slow
def test_who_has_no_token_is_refused_and_ctrl_c_leaves_no_process_no_folder_and_an_untouched_home(
    tmp_path: Path,
):
    with (
        tempfile.TemporaryDirectory(prefix="t-", dir="/tmp", ignore_cleanup_errors=True) as temp,
        # what the caller has of another cluster is not taken, and comes back
        private_ray(temp, HOME=str(tmp_path), RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN="a" * 64) as (
            child,
            said,
        ),
    ):
        assert said["worker"] == str(ROOT / "core" / "__init__.py")
        assert processes_of(said["folder"])
        file, url = Path(said["token"]), said["url"]
        await_dashboard(url)
        # metrics ask for no token: nobody from outside may reach it
        assert listeners(child.pid) == {"127.0.0.1"}
        token = file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(token) == 64
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        marker = Path(temp) / "ran"
        for shown, status in ((None, 401), ("b" * 64, 403), ("a" * 64, 403)):
            assert answer(url, shown)[0] == status
            assert answer(url, shown, f"touch {marker}")[0] == status
        assert answer(url, token)[0] == 200
        assert not marker.exists()
        # a stranger's driver is turned away, another command of this user's is not
        answers = nodes(said["gcs"], "", "b" * 64, "a" * 64, token)
        assert answers == ["UNAUTHENTICATED", "UNAUTHENTICATED", "UNAUTHENTICATED", "OK"]
        # with or without what the run's processes have in their environment
        env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": temp, "RAY_AUTH_MODE": "disabled"}
        for more in (_LOCAL_ENVIRONMENT, {}):
            own = subprocess.run(
                [sys.executable, "-m", "rlhfspec.cluster.cli", "status", "--address", said["gcs"]],
                env=env | more,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert own.returncode == 2 and "the cluster has no run that tells of itself" in own.stderr
        child.send_signal(signal.SIGINT)
        output, _ = child.communicate(timeout=120)
        assert output == f"disabled {'a' * 64} None\n" and child.returncode == 0
        deadline = time.monotonic() + 60
        while processes_of(said["folder"]):
            assert time.monotonic() < deadline, processes_of(said["folder"])
            time.sleep(0.2)
        assert not file.exists() and not file.parent.exists() and not Path(said["folder"]).parent.exists()
        assert list(tmp_path.iterdir()) == []


def test_the_environment_of_the_caller_comes_back_and_ray_reads_it_again(tmp_path: Path):
    mine = {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "mine"}
    done = subprocess.run(
        [sys.executable, "-c", USING, str(tmp_path)], env=os.environ | mine, capture_output=True, text=True
    )
    assert done.stdout == "False\nTrue\nFalse\n", done.stderr


def test_a_token_is_found_by_the_address_of_its_cluster_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = []
    for number in (1, 2):
        folder = tmp_path / f"rlhfspec-ray-{number}"
        folder.mkdir()
        files.append(make_token(folder))
        note_address(folder, f"127.0.0.1:6000{number}")
    assert token_of("127.0.0.1:60002") == token_of("localhost:60002") == files[1]
    assert (
        token_of("127.0.0.1:60003") is token_of("10.0.0.1:60002") is token_of("ray://127.0.0.1:60002") is None
    )
    with environment({"RAY_ADDRESS": "127.0.0.1:60001"}):
        assert token_of("auto") == files[0]
    assert files[0].read_text() != files[1].read_text()
    # one that is linked into the place may be anybody's, one whose process is gone is nobody's
    (tmp_path / "rlhfspec-ray-3").symlink_to(tmp_path / "rlhfspec-ray-1")
    assert token_of("127.0.0.1:60001") == files[0]
    with pytest.raises(FileExistsError):
        make_token(tmp_path / "rlhfspec-ray-1")
    subprocess.run([sys.executable, "-c", CLAIMING, str(files[1].parent)], cwd=ROOT, check=True)
    assert token_of("127.0.0.1:60002") is None
