"""Removes what was left behind: temporary Ray folders and half-written files of dead runs, logs of replaced actors.

Only where it is certain: of this user, written by a process of this machine that is gone, used by none. A process of
its own (`python -m` of this module) removes a temporary folder when the process that made it is gone, however that
ended: Ray ends its driver without a word to Python where its head dies, and a kill leaves no time for anything.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...core.files import PARTIAL, REPLACED, recover_folder, write_whole
from ...core.named_code import IMPORT_FOLDER
from ...core.proc_files import PARENT, stat_fields
from .owner import ProcessIdentity, processes_using
from .run_status import read_status

RAY_FOLDER = "rlhfspec-ray-"
"Begins the name of the temporary folder of a local Ray."
_WRITTEN = ("rollouts", "checkpoints", "evaluations", "samples")
OWNER_FILE = "rlhfspec-owner.json"
_LOOK_S = 0.02
_ENDED_S = 10.0
"After SIGKILL."


def claim(folder: Path) -> None:
    """Write down that this process owns a temporary folder. Raises StorageError."""
    write_whole(folder / OWNER_FILE, json.dumps(ProcessIdentity.of_this().as_tree()) + "\n")


def sweep_ray_folders(temp: Path) -> list[str]:
    """Delete temporary Ray folders in `temp` whose owner is gone; say what was done, a line each."""
    lines = []
    for folder in own_folders(temp, RAY_FOLDER):
        owner = _owner(folder)
        if owner is None or not owner.is_gone:
            continue
        left = processes_using(folder)
        if left:
            numbers = ", ".join(map(str, left))
            lines.append(f"left {folder} alone: its run is gone, but process {numbers} still uses it")
            continue
        shutil.rmtree(folder, ignore_errors=True)
        lines.append(f"removed {folder}, left by process {owner.pid}, which is gone")
    return lines


def sweep_run_folders(output_dir: Path) -> list[str]:
    """Delete half-written files of dead runs in `output_dir`, put back what a crash moved aside; say so."""
    lines = []
    for run in own_folders(output_dir, ""):
        who = ProcessIdentity.from_tree(read_status(run / "status.json"))
        if who is None or not who.is_gone:
            continue
        for folder in (run, *(run / name for name in _WRITTEN)):
            for replaced in folder.glob(REPLACED + "*"):
                with suppress(OSError):
                    recover_folder(folder / replaced.name.removeprefix(REPLACED))
            for partial in folder.glob(PARTIAL + "*"):
                if partial.is_dir() and not partial.is_symlink():
                    shutil.rmtree(partial, ignore_errors=True)
                else:
                    with suppress(OSError):
                        partial.unlink()
                lines.append(f"removed {partial}, which a dead run had not finished")
    return lines


def end_processes(folder: Path, *, spared: Container[int] = ()) -> None:
    """Kill what still uses a temporary folder of this process's own: Ray's agents and workers outlive their raylet."""
    ends_s = time.monotonic() + _ENDED_S
    while (
        left := [pid for pid in processes_using(folder) if pid != os.getpid() and pid not in spared]
    ) and time.monotonic() < ends_s:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)


def remove_with_processes(folder: Path, *, spared: Container[int] = ()) -> None:
    """Delete a temporary folder of this process's own, and end first what would write into it."""
    end_processes(folder, spared=spared)
    shutil.rmtree(folder, ignore_errors=True)


def own_folders(parent: Path, prefix: str) -> Iterator[Path]:
    """Folders of this user whose names begin so; no links."""
    for folder in sorted(parent.glob(prefix + "*")):
        with suppress(OSError):
            if not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.getuid():
                yield folder


def is_left(folder: Path) -> bool:
    """Whether it is certain that the process which claimed a temporary folder is gone."""
    owner = _owner(folder)
    return owner is not None and owner.is_gone


def _owner(folder: Path) -> ProcessIdentity | None:
    try:
        tree = json.loads((folder / OWNER_FILE).read_text())
    except (OSError, ValueError):
        return None
    return ProcessIdentity.from_tree(tree) if isinstance(tree, dict) else None


@contextmanager
def removed_when_gone(folder: Path) -> Iterator[None]:
    """Have the folder, and what runs in it, ended with the block or with this process."""
    watch = subprocess.Popen(
        [sys.executable, "-m", "rlhfspec.cluster.folder.leftovers"],
        cwd=IMPORT_FOLDER,
        env=os.environ | {"PYTHONPATH": str(IMPORT_FOLDER)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # a Ctrl-C is for the run
        start_new_session=True,
    )
    assert watch.stdin is not None
    # whoever started the run may look into the folder, or delete it, and is not ended
    spared = set(_ancestors(os.getpid()))
    try:
        # said by this process: it may be gone before the other one is up
        watch.stdin.write(os.fsencode(folder) + b"\0" + " ".join(map(str, spared)).encode())
        watch.stdin.flush()
        yield
    finally:
        with uninterrupted():
            remove_with_processes(folder, spared=spared)
            with suppress(OSError):
                watch.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                watch.wait(5.0)


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


KEPT_LOGS = 128
"Files; a process has up to two of 8 MB."
WRITTEN_S = 3600.0
"A log that was written to since is another matter: its process may live."


def drop_old_logs(folder: Path, *, now: float, most: int = KEPT_LOGS) -> None:
    """Keep the files that were written to last, and all of the last hour; `now` in seconds since the epoch.

    A living process whose log goes begins a new one with its next line.
    """
    found: list[tuple[float, Path]] = []
    with suppress(OSError):
        for path in folder.glob("*.jsonl*"):
            with suppress(OSError):
                found.append((path.stat().st_mtime, path))
    for changed, path in sorted(found)[: max(len(found) - most, 0)]:
        if now - changed > WRITTEN_S:
            with suppress(OSError):
                path.unlink()


def main() -> None:
    """Read the folder's name, and remove it when nobody holds the other end of the pipe any more."""
    folder, separator, spared = sys.stdin.buffer.read().partition(b"\0")
    if separator and Path(os.fsdecode(folder)).exists():
        remove_with_processes(Path(os.fsdecode(folder)), spared=set(map(int, spared.split())))


def _ancestors(pid: int) -> Iterator[int]:
    while len(fields := stat_fields(pid)) > PARENT and (pid := int(fields[PARENT])) > 1:
        yield pid


if __name__ == "__main__":
    main()
