"""Takes a run folder back to a state, and keeps the record of a run in its states.

What was written of later iterations goes, since it is made again. A line of the record that is cut, changed or gone is
put back from the state:

STATE/record/metrics.jsonl.gz, ...      what the run's own file held when the state was taken
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import StorageError
from ...core.files import PARTIAL, storage_errors, write_whole
from ..folder.layout import RunDir
from .run_state import RunState

FOLDER = "record"
_SHOWN = 5
"Numbers of lost lines that are spelled out."

IsKept = Callable[[dict[str, Any]], bool]
_NUMBERED = re.compile(r"(?:iteration|evaluation)[_-](\d+)(?:\.\w+)+")
_CHECKPOINT = re.compile(r"(?:target|draft|adapter|state)_(\d+)")


def rewind(run_dir: RunDir, state: RunState | None, note: Callable[[str], None]) -> None:
    """Keep what was written up to a state, and nothing of later iterations; None: nothing at all.

    Lines of the record that were cut or lost are put back from the state, or named; `note` is told.
    The last checkpoints (`target`, `draft`, `adapter`) and the best stay until they are written again.
    Raises StorageError.
    """
    finished, version = (-1, -1) if state is None else (state.num_iterations, state.weight_version)
    ends = {
        run_dir.metrics_file: ("iteration", finished),
        run_dir.weights_file: ("weight_version", version + 1),
    }
    for file, is_kept in record_files(run_dir, num_iterations=finished, weight_version=version).items():
        lines: Sequence[str] = whole_lines(file, is_kept)
        if state is not None:
            lines = repaired(file, lines, state.folder, note)
        _write_lines(file, lines)
        if state is not None and file in ends:
            note_gaps(file, *ends[file], lines, note)
    for folder in ("rollouts", "samples", "steps", "traces"):
        _remove_from(run_dir.path / folder, max(finished, 0))
    _remove_from(run_dir.path / "evaluations", finished + 1)
    checkpoints = run_dir.path / "checkpoints"
    # a state has the number of finished iterations, the others that of the last one, counted from 0
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        match = _CHECKPOINT.fullmatch(path.name)
        is_later = match and int(match[1]) - path.name.startswith("state_") >= max(finished, 0)
        # or half written when the run was cut off
        if is_later or (path.name.startswith(PARTIAL) and path.is_dir()):
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


def record_files(run_dir: RunDir, *, num_iterations: int, weight_version: int) -> dict[Path, IsKept]:
    """Each file of the record, and which of its lines are of finished iterations."""
    by_iteration: IsKept = lambda row: row["iteration"] < num_iterations  # noqa: E731
    return {
        run_dir.metrics_file: by_iteration,
        run_dir.histograms_file: by_iteration,
        run_dir.moves_file: by_iteration,
        run_dir.evaluations_file: lambda row: row["num_iterations"] <= num_iterations,
        run_dir.weights_file: lambda row: row["weight_version"] <= weight_version,
    }


def whole_lines(path: Path, is_kept: IsKept) -> list[str]:
    """Lines that are kept; what is cut or damaged, or of later iterations, is left out."""
    kept = []
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        try:
            if is_kept(json.loads(line)):
                kept.append(line.decode())
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return kept


def keep_record(run_dir: RunDir, state: RunState) -> None:
    """Put the record so far into the folder of a state that is being written. Raises StorageError."""
    folder = state.folder / FOLDER
    with storage_errors(folder):
        folder.mkdir()
    files = record_files(run_dir, num_iterations=state.num_iterations, weight_version=state.weight_version)
    for file, is_kept in files.items():
        if lines := whole_lines(file, is_kept):
            write_whole(_copy_of(state.folder, file), gzip.compress(_text(lines), 1, mtime=0), durable=False)


def repaired(file: Path, lines: Sequence[str], state: Path, note: Callable[[str], None]) -> Sequence[str]:
    """The lines of a file as a state kept them; `note` is told where `lines`, those of the run, are others.

    A state of an earlier version keeps none: then what is there. Raises StorageError: its copy cannot be read.
    """
    if not (state / FOLDER).is_dir():
        return lines
    kept = _read(_copy_of(state, file))
    if list(lines) != kept:
        both = set(kept)
        lost, foreign = len(both - set(lines)), sum(line not in both for line in lines)
        counts = {f"lacked {lost} of its lines": lost, f"had {foreign} others": foreign}
        what = " and ".join(text for text, count in counts.items() if count)
        note(f"{file} {what or 'had its lines in another order'}: put back from {state.name}")
    return kept


def note_gaps(
    file: Path, key: str, end: int, lines: Sequence[str], note: Callable[[str], None], *, first: int = 0
) -> None:
    """Name what a file should have a line of, from `first` up to before `end`, and has none."""
    found = {json.loads(line)[key] for line in lines}
    lost = [number for number in range(first, end) if number not in found]
    if lost:
        shown = ", ".join(map(str, lost[:_SHOWN])) + (", ..." if len(lost) > _SHOWN else "")
        note(
            f"{file} lacks {len(lost)} of {end - first} lines ({key} {shown}) that no state keeps: they were cut, "
            "damaged or taken away, and are not made again"
        )


def _copy_of(state: Path, file: Path) -> Path:
    return state / FOLDER / f"{file.name}.gz"


def _read(copy: Path) -> list[str]:
    """Lines of a copy; none where there was no file."""
    if not copy.is_file():
        return []
    try:
        return gzip.decompress(copy.read_bytes()).decode().split("\n")[:-1]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise StorageError(
            f"cannot read {copy}: {error}; its state was whole a moment ago: look at the disk"
        ) from error


def _text(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
