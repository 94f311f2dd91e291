"""Keeps the folder of logs bounded: actors that were replaced leave theirs behind."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

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
