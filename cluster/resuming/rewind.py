"""Takes a run folder back to a state: what was written of later iterations goes, since it is made again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from cluster.run_folder.layout import RunDir
from core.files import storage_errors, write_whole

_NUMBERED = re.compile(r"(?:iteration|evaluation)[_-](\d+)\.\w+")
_CHECKPOINT = re.compile(r"(?:target|draft|adapter|state)_(\d+)")


def rewind(run_dir: RunDir, *, num_iterations: int) -> None:
    """Keep what so many iterations have written, and nothing of later ones. Raises StorageError.

    The last checkpoints (`target`, `draft`, `adapter`) and the best stay until they are written again.
    """
    _keep_lines(run_dir.metrics_file, lambda row: row["iteration"] < num_iterations)
    _keep_lines(run_dir.histograms_file, lambda row: row["iteration"] < num_iterations)
    _keep_lines(run_dir.moves_file, lambda row: row["iteration"] < num_iterations)
    _keep_lines(run_dir.evaluations_file, lambda row: row["num_iterations"] <= num_iterations)
    for folder in ("rollouts", "samples", "steps"):
        _remove_from(run_dir.path / folder, _NUMBERED, num_iterations)
    _remove_from(run_dir.path / "evaluations", _NUMBERED, num_iterations + 1)
    checkpoints = run_dir.path / "checkpoints"
    # a state has the number of finished iterations, the others that of the last one, counted from 0
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        match = _CHECKPOINT.fullmatch(path.name)
        if match and int(match[1]) - path.name.startswith("state_") >= num_iterations:
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
        except (ValueError, KeyError, TypeError):
            continue
    write_whole(path, "".join(kept))


def _remove_from(folder: Path, name: re.Pattern[str], first: int) -> None:
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        match = name.fullmatch(path.name)
        if match and int(match[1]) >= first:
            with storage_errors(path):
                path.unlink()
