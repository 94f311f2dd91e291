"""Runs a script that starts a Ray of its own, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def answer_of(script: str, *, timeout_s: float) -> Any:
    """Return what the script prints in its last line, as JSON; where it fails, fail with what it said."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
        )
        # Ray gives its own node 30 s, which a busy machine may not keep
        if "node timed out during startup" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
