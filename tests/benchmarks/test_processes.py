"""Commands that a benchmark starts end with it, however it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfspec.benchmarks.support.result import ROOT

LIMIT_MS = 60_000
BENCH = """
import sys
from pathlib import Path
from rlhfspec.benchmarks.support.processes import start_command
folder = Path(sys.argv[1])
# in the place of a training, which takes as long
sys.executable = str(folder / "waits")
print(start_command(["train"], folder=folder, log=folder / "log").pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a child of its parent's end")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_is_told_to_end_when_its_benchmark_ends(tmp_path: Path, number: signal.Signals) -> None:
    waits = tmp_path / "waits"
    waits.write_text("#!/bin/sh\nexec sleep 600\n")
    waits.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-c", BENCH, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as bench:
        assert bench.stdout is not None
        pid = int(bench.stdout.readline())
        child = os.pidfd_open(pid)
        bench.send_signal(number)
        ended = select.poll()
        ended.register(child, select.POLLIN)
        has_ended = bool(ended.poll(LIMIT_MS))
    os.close(child)
    if not has_ended:
        os.kill(pid, signal.SIGKILL)
    assert has_ended
