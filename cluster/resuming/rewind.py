"""Takes a run folder back to a state: what was written of later iterations goes, since it is made again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from cluster.resuming.run_state import RunState
from cluster.run_folder.layout import RunDir
from core.files import PARTIAL, storage_errors, write_whole

_NUMBERED = re.compile(r"(?:iteration|evaluation)[_-](\d+)(?:\.\w+)+")
_CHECKPOINT = re.compile(r"(?:target|draft|adapter|state)_(\d+)")


def rewind(run_dir: RunDir, state: RunState | None) -> None:
    """Keep what was written up to a state, and nothing of later iterations; None: nothing at all.

    The last checkpoints (`target`, `draft`, `adapter`) and the best stay until they are written again.
    Raises StorageError.
    """
    finished, version = (-1, -1) if state is None else (state.num_iterations, state.weight_version)
    for file in (run_dir.metrics_file, run_dir.histograms_file, run_dir.moves_file):
        _keep_lines(file, lambda row: row["iteration"] < finished)
    _keep_lines(run_dir.evaluations_file, lambda row: row["num_iterations"] <= finished)
    _keep_lines(run_dir.weights_file, lambda row: row["weight_version"] <= version)
    for folder in ("rollouts", "samples", "steps", "traces"):
        _remove_from(run_dir.path / folder, max(finished, 0))
    _remove_from(run_dir.path / "evaluations", finished + 1)
    checkpoints = run_dir.path / "checkpoints"
    # a state has the number of finished iterations, the others that of the last one, counted from 0
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        if path.name.startswith(PARTIAL) and path.is_dir():
            # half written when the run was cut off
            with storage_errors(path):
                shutil.rmtree(path)
            continue
        match = _CHECKPOINT.fullmatch(path.name)
        if match and int(match[1]) - path.name.startswith("state_") >= max(finished, 0):
            with storage_errors(path):
                shutil.rmtree(path)


def _keep_lines(path: Path, is_kept: Callable[[dict], bool]) -> None:
    """Drop lines of later iterations, and what a kill has cut."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            if is_kept(json.loads(line)):
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    if kept:
        write_whole(path, "".join(kept))
    else:
        with storage_errors(path):
            path.unlink()


def _remove_from(folder: Path, first: int) -> None:
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        match = _NUMBERED.fullmatch(path.name)
        if match and int(match[1]) >= first:
            with storage_errors(path):
                path.unlink()
