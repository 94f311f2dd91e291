"""Peak memory of a process of its own: the module that is run prints what `peak_bytes` returns as its last word."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhfspec.core.errors import RlhfSpecError, WaitTimeout

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 600.0


def measured_in_a_process(bench: str, module: str, arguments: Sequence[str]) -> int:
    """Run `python -m MODULE ARGUMENTS` for a benchmark and return the bytes that it prints.

    Raises WaitTimeout, and RlhfSpecError with its last line when it fails.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise WaitTimeout(
            waiter=f"bench {bench}",
            waited_for="its memory process",
            order=" ".join(arguments[-2:]),
            waited_s=_TIMEOUT_S,
            advice="run it on an idle machine",
        ) from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RlhfSpecError(f"bench {bench}: {' '.join(command[1:])} failed: {last}") from error
    return int(done.stdout.split()[-1])


def peak_bytes() -> int:
    """Peak resident bytes since this program began; `ru_maxrss` would count the parent that started it."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
