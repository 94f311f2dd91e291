"""Traces of the last iterations, as the run keeps them; `rlhfspec trace` hands one out for ui.perfetto.dev."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path

from rlhfspec.cluster.folder.layout import KEPT_TRACES, RunDir
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.files import write_whole

_NAME = re.compile(r"iteration_(\d+)\.json\.gz")


def kept_iterations(run_dir: RunDir) -> list[int]:
    """Iterations whose traces are there, counted from 0, in order."""
    folder = run_dir.trace_file(0).parent
    names = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name[1]) for name in names if name is not None)


def write_kept_trace(run_dir: RunDir, number: int | None, out: Path | None) -> Path:
    """Write the trace of one iteration as JSON, and return where.

    Args:
        run_dir: of a run that lives or has ended.
        number: of the iteration, counted from 1 as the run prints it; None for the last.
        out: the file; None for one of the run's and the iteration's name in the current folder.

    Raises ConfigError for an iteration without one, StorageError when the file cannot be written.
    """
    kept = kept_iterations(run_dir)
    iteration = number - 1 if number is not None else max(kept, default=-1)
    if iteration not in kept:
        have = f"{kept[0] + 1} to {kept[-1] + 1}" if kept else "none yet"
        which = f"iteration {number}" if number is not None else "any iteration"
        raise ConfigError(
            f"{run_dir.path} has no trace of {which}; it has {have}: the last {KEPT_TRACES} are kept"
        )
    path = out or Path.cwd() / f"{run_dir.path.name}-iteration-{iteration + 1}.json"
    kept_file = run_dir.trace_file(iteration)
    try:
        text = gzip.decompress(kept_file.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{kept_file} cannot be read: {error}; choose another iteration") from error
    write_whole(path, text)
    return path
