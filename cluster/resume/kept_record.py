"""The record of a run as its states keep it: a line that is cut, changed or gone is put back from there.

STATE/record/metrics.jsonl.gz, ...      what the run's own file held when the state was taken
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.core.errors import StorageError
from rlhfspec.core.files import storage_errors, write_whole

FOLDER = "record"
_SHOWN = 5
"Numbers of lost lines that are spelled out."

IsKept = Callable[[dict[str, Any]], bool]


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


def keep_record(run_dir: RunDir, state: Path, *, num_iterations: int, weight_version: int) -> None:
    """Put the record so far into the folder of a state that is being written. Raises StorageError."""
    folder = state / FOLDER
    with storage_errors(folder):
        folder.mkdir()
    files = record_files(run_dir, num_iterations=num_iterations, weight_version=weight_version)
    for file, is_kept in files.items():
        lines = whole_lines(file, is_kept)
        if lines:
            write_whole(_copy_of(state, file), gzip.compress(_text(lines), 1, mtime=0), durable=False)


def mended(file: Path, lines: Sequence[str], state: Path, note: Callable[[str], None]) -> Sequence[str]:
    """The lines of a file as a state kept them; `note` is told where `lines`, those of the run, are others.

    A state of an earlier version keeps none: then what is there. Raises StorageError: its copy cannot be read.
    """
    if not (state / FOLDER).is_dir():
        return lines
    kept = _read(_copy_of(state, file))
    if list(lines) != kept:
        both = set(kept)
        lost, foreign = len(both - set(lines)), sum(line not in both for line in lines)
        what = " and ".join(
            text
            for text, count in ((f"lacked {lost} of its lines", lost), (f"had {foreign} others", foreign))
            if count
        )
        note(f"{file} {what or 'had its lines in another order'}: put back from {state.name}")
    return kept


def note_gaps(
    file: Path, key: str, lines: Sequence[str], first: int, end: int, note: Callable[[str], None]
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
