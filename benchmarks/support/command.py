"""Runs `rlhfspec` commands as a user does, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.result import ROOT
from core.errors import RlhfSpecError

TIMEOUT_S = 1800.0
_LAST_CHARS = 1500


def run_command(arguments: Sequence[str], *, folder: Path, log: Path) -> float:
    """Run `rlhfspec ARGUMENTS` in a folder, its output in `log`; the seconds it took.

    Raises RlhfSpecError with the end of what it said when it fails.
    """
    began_s = time.perf_counter()
    with log.open("w+") as said:
        ended = subprocess.run(
            [sys.executable, "-m", "cluster.cli", *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
        if ended.returncode:
            said.seek(0)
            raise RlhfSpecError(
                f"rlhfspec {' '.join(arguments)} ended with {ended.returncode}; expected 0; it said: "
                f"{said.read()[-_LAST_CHARS:]}"
            )
    return time.perf_counter() - began_s
