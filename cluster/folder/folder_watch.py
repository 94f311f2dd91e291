"""A process of its own that removes a temporary folder when the process that made it is gone, however that ended.

Ray ends its driver without a word to Python where its head dies, and a kill leaves no time for anything.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhfspec.cluster.folder.leftovers import remove_with_processes

_ROOT = Path(__file__).resolve().parents[2]
_ENDED_S = 5.0


@contextmanager
def removed_when_gone(folder: Path) -> Iterator[None]:
    """Have the folder, and what runs in it, ended with the block or with this process."""
    watch = subprocess.Popen(
        [sys.executable, "-m", "rlhfspec.cluster.folder.folder_watch"],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # a Ctrl-C is for the run
        start_new_session=True,
    )
    assert watch.stdin is not None
    try:
        watch.stdin.write(os.fsencode(folder) + b"\0")
        watch.stdin.flush()
        yield
    finally:
        with uninterrupted():
            remove_with_processes(folder)
            with suppress(OSError):
                watch.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                watch.wait(_ENDED_S)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let a second Ctrl-C or SIGTERM not cut the clean-up short; it takes about two seconds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> None:
    """Read the folder's name, and remove it when nobody holds the other end of the pipe any more."""
    folder, told, _ = sys.stdin.buffer.read().partition(b"\0")
    if told and Path(os.fsdecode(folder)).exists():
        remove_with_processes(Path(os.fsdecode(folder)))


if __name__ == "__main__":
    main()
