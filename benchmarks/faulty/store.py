"""Starts what fills the object store of a running command's own cluster, as another user of the cluster would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from benchmarks.support.processes import descendants
from benchmarks.support.result import ROOT
from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.core.proc_files import PROC

LIMIT_S = 180.0


def fill_store(driver: int, seconds: float, log: Path) -> float:
    """Fill it, and return when it has been let go: since when it was full, by `time.monotonic`; words go to `log`.

    Raises RlhfSpecError when it could not be filled, or is not let go within its limit.
    """
    command = [sys.executable, "-m", "benchmarks.faulty.fill_store", cluster_address(driver), str(seconds)]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with (
        log.open("ab") as said,
        subprocess.Popen(
            command, cwd=log.parent, env=environment, stdout=subprocess.PIPE, stderr=said
        ) as filler,
    ):
        try:
            words = filler.communicate(timeout=seconds + LIMIT_S)[0].decode()
        except subprocess.TimeoutExpired:
            words = ""
        finally:
            filler.kill()
        said.write(words.encode())
    full = re.search(r"full at (\S+):", words)
    if full is None or filler.returncode != 0:
        raise RlhfSpecError(
            f"the object store could not be filled within {LIMIT_S:.0f} s: the filler ended with "
            f"{filler.returncode}, expected 0; see {log}"
        )
    return float(full[1])


def cluster_address(driver: int) -> str:
    """`host:port` of the Ray that a driver started, read from its raylet's command line. Raises RlhfSpecError."""
    for pid in descendants(driver):
        with suppress(OSError):
            words = (PROC / str(pid) / "cmdline").read_text(errors="replace").replace("\0", " ")
            if found := re.search(r"raylet .*--gcs-address=(\S+)", words):
                return found[1]
    raise RlhfSpecError(f"process {driver} has no raylet below it; expected a run with a Ray of its own")
