"""Structured logs, a file a process, in the run folder: `logs/gen-0.jsonl`, one object a line.

A line has time, level, logger, text, and the error's traceback; the first says pid and host. Nothing stays open between
two lines, so that a file system can be unmounted while a process lives; a line that cannot be written is counted and
left out, since a log is not worth a run. A file is rotated at MAX_BYTES, one older file is kept.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...core.files import append_whole
from . import run_metrics

MAX_BYTES = 8 << 20
OURS = "rlhfspec"
"The logger whose lines of level INFO are kept, with those below it; of others, warnings and worse."


class LineLog(logging.Handler):
    """Appends one JSON object a record, each whole or not at all."""

    def __init__(self, path: Path, actor: str) -> None:
        super().__init__()
        self._path, self._actor = path, actor
        self.num_dropped = 0
        "lines that could not be written"

    def emit(self, record: logging.LogRecord) -> None:
        """Append the record."""
        try:
            line = self._line(record)
            with suppress(FileNotFoundError):
                if self._path.stat().st_size + len(line) > MAX_BYTES:
                    self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            append_whole(self._path, line)
        except Exception:
            self.num_dropped += 1
            with suppress(Exception):
                run_metrics.add("dropped_writes", file="log")

    def _line(self, record: logging.LogRecord) -> bytes:
        tree: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "actor": self._actor,
            "logger": record.name,
            "text": record.getMessage(),
        }
        if record.exc_info:
            tree["error"] = logging.Formatter().formatException(record.exc_info)
        return json.dumps(tree | getattr(record, "fields", {}), default=str).encode() + b"\n"


def begin_process_log(folder: Path, name: str, *, run: str) -> Callable[[], None]:
    """Log to `folder/name.jsonl` from here on; returns what ends it.

    A node that does not see the run folder keeps no log.
    """
    try:
        if not folder.parent.is_dir():
            return lambda: None
        folder.mkdir(exist_ok=True)
    except OSError:
        return lambda: None
    end = _attach(LineLog(folder / f"{name}.jsonl", name))
    fields = {"run": run, "pid": os.getpid(), "host": socket.gethostname()}
    logging.getLogger(__name__).info("%s begins", name, extra={"fields": fields})
    return end


def _attach(handler: logging.Handler) -> Callable[[], None]:
    """Hand records of our loggers from INFO on to `handler`; other handlers get no more than before."""
    root = logging.getLogger()
    levels: list[tuple[logging.Handler | logging.Logger, int]] = [(one, one.level) for one in root.handlers]
    for other in root.handlers:
        other.setLevel(max(other.level, root.level))
    root.addHandler(handler)
    ours = logging.getLogger(OURS)
    if ours.level == logging.NOTSET:
        levels.append((ours, ours.level))
        ours.setLevel(logging.INFO)

    def end() -> None:
        root.removeHandler(handler)
        handler.close()
        for one, level in levels:
            one.setLevel(level)

    return end
