"""`rlhfspec serve engine` as a user runs it: it says that it is ready, answers, and leaves no process after SIGTERM."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import requests

from rlhfspec.benchmarks.support.processes import descendants, start_command
from rlhfspec.benchmarks.support.result import ROOT
from rlhfspec.cluster.ray_start.ray_init import free_ports
from rlhfspec.cluster.ray_start.ray_session import TERMINATED
from tests.conftest import TinyPair

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]

TIMEOUT_S = 240.0


def wait_for(holds, what: str) -> None:
    ends_s = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < ends_s, what
        time.sleep(0.2)


def test_the_command_serves_and_ends_whole(tiny_pair: TinyPair, tmp_path: Path):
    port, log, token = free_ports(1)[0], tmp_path / "log", tmp_path / "token"
    token.write_text("a-secret\n")
    words = [
        "serve",
        "engine",
        "--model",
        str(tiny_pair.target),
        "--served-name",
        "tiny",
        "--port",
        str(port),
    ]
    words += [
        "--token-file",
        str(token),
        "--set",
        "cluster.generation.num_actors=1",
        "--set",
        "engine.probe=false",
    ]
    server = start_command(words, folder=ROOT, log=log)
    below: set[int] = set()
    try:
        wait_for(lambda: "ready" in log.read_text() or server.poll() is not None, "it did not come up")
        assert server.poll() is None, log.read_text()
        asked = {"prompt": "12", "n": 4, "max_tokens": 100, "ignore_eos": True}
        answer = requests.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json=asked,
            headers={"Authorization": "Bearer a-secret"},
            timeout=TIMEOUT_S,
        )
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 400, answer.text
        below = descendants(server.pid)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=TIMEOUT_S) == TERMINATED, log.read_text()
    finally:
        server.kill()
    wait_for(lambda: not [pid for pid in below if Path(f"/proc/{pid}").exists()], "processes were left")
