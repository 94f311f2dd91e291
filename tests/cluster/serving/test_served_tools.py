"""The `openai` package's own client calls tools over a server, turn after turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from calling_pair import save_calling_pair
from served_engine import TOKEN, ServedEngine, serve_pair

from rlhfspec.benchmarks.peers.build import library_folder
from rlhfspec.benchmarks.support.result import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    save_calling_pair(folder := tmp_path_factory.mktemp("calling"))
    yield from serve_pair(folder, max_open=8, num_instances=1)


def test_openais_client_calls_tools_in_turns(server: ServedEngine):
    folder = library_folder("openai")
    if folder is None:
        pytest.skip("openai is not there: python -m rlhfspec.benchmarks.peers.build")
    script = ROOT / "tests" / "helpers" / "openai_tools_run.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), server.url, TOKEN],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["reasons"] == ["tool_calls", "stop"] and got["content"] is None
    assert (got["tool"], got["answer"]) == ("Oslo: 20", "It is warm")
    call = got["call"]
    assert (call["type"], call["function"]) == (
        "function",
        function := {"name": "weather", "arguments": '{"city": "Oslo"}'},
    )
    assert got["streamed"] == [{"0": {"id": call["id"], **function}}, "tool_calls"]
    assert got["must"] == [["tool_calls", None, function], ["stop", None, function]]
