"""Takes a run folder back to a state: what was written of later iterations goes, since it is made again."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.resume.kept_record import mended, note_gaps, record_files, whole_lines
from rlhfspec.cluster.resume.run_state import RunState
from rlhfspec.core.files import PARTIAL, storage_errors, write_whole

_NUMBERED = re.compile(r"(?:iteration|evaluation)[_-](\d+)(?:\.\w+)+")
_CHECKPOINT = re.compile(r"(?:target|draft|adapter|state)_(\d+)")


def rewind(run_dir: RunDir, state: RunState | None, note: Callable[[str], None]) -> None:
    """Keep what was written up to a state, and nothing of later iterations; None: nothing at all.

    Lines of the record that were cut or lost are put back from the state, or named; `note` is told.
    The last checkpoints (`target`, `draft`, `adapter`) and the best stay until they are written again.
    Raises StorageError.
    """
    finished, version = (-1, -1) if state is None else (state.num_iterations, state.weight_version)
    for file, is_kept in record_files(run_dir, num_iterations=finished, weight_version=version).items():
        lines: Sequence[str] = whole_lines(file, is_kept)
        if state is not None:
            lines = mended(file, lines, state.folder, note)
        _write_lines(file, lines)
        if state is not None and file == run_dir.metrics_file:
            note_gaps(file, "iteration", lines, 0, finished, note)
        if state is not None and file == run_dir.weights_file:
            note_gaps(file, "weight_version", lines, 0, version + 1, note)
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


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    if lines:
        write_whole(path, "".join(f"{line}\n" for line in lines))
    else:
        with storage_errors(path):
            path.unlink(missing_ok=True)


def _remove_from(folder: Path, first: int) -> None:
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        match = _NUMBERED.fullmatch(path.name)
        if match and int(match[1]) >= first:
            with storage_errors(path):
                path.unlink()
