"""A private Ray lets in who can read its token, and nobody else: neither to its jobs nor to the cluster."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhfspec.cluster.placement.private_ray import environment, make_token, note_address, token_of
from rlhfspec.cluster.placement.ray_session import _LOCAL_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[3]

WAITING = """
import json, os
from rlhfspec.core.settings.cluster import ClusterConfig
from rlhfspec.cluster.placement.ray_session import ray_session
import ray
with ray_session(ClusterConfig(), "test") as session:
    @ray.remote(num_cpus=0.1)
    def one():
        return 1
    assert ray.get(one.remote()) == 1
    gcs = ray.get_runtime_context().gcs_address
    print(json.dumps({"url": session.dashboard_url, "token": str(session.token_file), "gcs": gcs}), flush=True)
    input()
print(os.environ.get("RAY_AUTH_MODE"), os.environ.get("RAY_AUTH_TOKEN"), os.environ.get("RAY_AUTH_TOKEN_PATH"))
"""


USING = """
import os, sys
from pathlib import Path
from ray._raylet import AuthenticationMode, get_authentication_mode
from rlhfspec.cluster.placement.private_ray import make_token, using_token
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
address, token = sys.argv[1:]
shown = [("authorization", f"Bearer {token}")] if token else []
with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
    head = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
    try:
        head.GetAllNodeInfo(gcs_service_pb2.GetAllNodeInfoRequest(), timeout=60, metadata=shown)
        print("OK")
    except grpc.RpcError as error:
        print(error.code().name)
"""


def nodes(address: str, token: str | None) -> str:
    """What the cluster's head says to who asks for its nodes, as every driver does first."""
    asked = subprocess.run(
        [sys.executable, "-c", ASKING, address, token or ""], capture_output=True, text=True, timeout=300
    )
    return asked.stdout.strip() or asked.stderr


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


@contextmanager
def private_ray(temp: str, **more: str) -> Iterator[tuple[subprocess.Popen, dict[str, str]]]:
    names = ("RAY_AUTH_MODE", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    child = subprocess.Popen(
        [sys.executable, "-c", WAITING],
        env=kept | {"PYTHONPATH": str(ROOT), "TMPDIR": temp, "HOME": temp} | more,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        yield child, json.loads(child.stdout.readline())
    finally:
        child.kill()
        child.communicate()


@pytest.mark.ray
@pytest.mark.slow
def test_the_job_api_and_the_cluster_refuse_who_has_no_token():
    with (
        tempfile.TemporaryDirectory(prefix="t-", dir="/tmp", ignore_cleanup_errors=True) as temp,
        # what the caller has of another cluster is not taken, and comes back
        private_ray(temp, RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN="a" * 64) as (child, said),
    ):
        file, url = Path(said["token"]), said["url"]
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
        for shown in (None, "b" * 64, "a" * 64):
            assert nodes(said["gcs"], shown) == "UNAUTHENTICATED"
        assert nodes(said["gcs"], token) == "OK"
        # with or without what the run's processes have in their environment
        env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": temp, "RAY_AUTH_MODE": "disabled"}
        for command, more in (("status", {}), ("status", _LOCAL_ENVIRONMENT), ("diagnose", {})):
            own = subprocess.run(
                [sys.executable, "-m", "rlhfspec.cluster.cli", command, "--address", said["gcs"]],
                env=env | more,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert own.returncode == 2 and "the cluster has no run that tells of itself" in own.stderr
        output, _ = child.communicate("\n", timeout=120)
        assert output == f"disabled {'a' * 64} None\n" and child.returncode == 0
        assert not file.exists() and not file.parent.exists()
        assert not (Path(temp) / ".ray").exists()


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
