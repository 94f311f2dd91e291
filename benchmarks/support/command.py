"""Runs `rlhfspec` commands as a user does, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.support.result import ROOT
from rlhfspec.core.errors import RlhfSpecError

TIMEOUT_S = 1800.0
_LAST_CHARS = 1500


def run_command(arguments: Sequence[str], *, folder: Path, log: Path) -> float:
    """Run `rlhfspec ARGUMENTS` in a folder, its output in `log`; the seconds it took.

    Raises RlhfSpecError with the end of what it said when it fails.
    """
    began_s = time.perf_counter()
    with start_command(arguments, folder=folder, log=log) as command:
        try:
            code = command.wait(timeout=TIMEOUT_S)
        except BaseException:
            command.kill()
            raise
    if code:
        raise RlhfSpecError(
            f"rlhfspec {' '.join(arguments)} ended with {code}; expected 0; it said: "
            f"{log.read_text(errors='replace')[-_LAST_CHARS:]}"
        )
    return time.perf_counter() - began_s


def start_command(arguments: Sequence[str], *, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start `rlhfspec ARGUMENTS` in a folder, its output in `log`; the caller waits for it."""
    with log.open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "rlhfspec.cluster.cli", *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=subprocess.STDOUT,
        )


def setting_words(settings: Iterable[str]) -> list[str]:
    """`--set` before each KEY=VALUE."""
    return [word for setting in settings for word in ("--set", setting)]
