"""Removes what dead runs left behind: temporary Ray folders, and files that were being written.

Only where it is certain: of this user, written by a process of this machine that is gone, used by none.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rlhfspec.cluster.folder.process_identity import ProcessIdentity, processes_using
from rlhfspec.cluster.folder.run_status import read_status
from rlhfspec.core.files import PARTIAL, REPLACED, recover_folder, write_whole

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
                _remove(partial)
                lines.append(f"removed {partial}, which a dead run had not finished")
    return lines


def end_processes(folder: Path) -> None:
    """Kill what still uses a temporary folder of this process's own: Ray's agents and workers outlive their raylet."""
    ends_s = time.monotonic() + _ENDED_S
    while (
        left := [pid for pid in processes_using(folder) if pid != os.getpid()]
    ) and time.monotonic() < ends_s:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)


def remove_with_processes(folder: Path) -> None:
    """Delete a temporary folder of this process's own, and end first what would write into it."""
    end_processes(folder)
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


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
