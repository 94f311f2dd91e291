"""Structured logs, a file a process, in the run folder; a process writes its stacks there when it is asked to.

    logs/gen-0.jsonl    one object a line: time, level, logger, text, and the error's traceback
    logs/gen-0.stacks   stacks of all threads, at each SIGUSR2 and before a crash (`faulthandler`)

A process's first line says its pid and host. A file is rotated at MAX_BYTES, one older file is kept.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

MAX_BYTES = 8 << 20
STACKS_SIGNAL = signal.SIGUSR2
OURS = ("core", "profiles", "policies", "engine", "learning", "actors", "cluster")
"Loggers whose lines of level INFO are kept; of others, warnings and worse."

_open: dict[str, Any] = {}


class JsonLines(logging.Formatter):
    """One JSON object a record."""

    def __init__(self, actor: str) -> None:
        super().__init__()
        self._actor = actor

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        tree: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "actor": self._actor,
            "logger": record.name,
            "text": record.getMessage(),
        }
        if record.exc_info:
            tree["error"] = self.formatException(record.exc_info)
        return json.dumps(tree | getattr(record, "fields", {}))


def begin_process_log(folder: Path, name: str, *, run: str) -> Callable[[], None]:
    """Log to `folder/name.jsonl` from here on, and answer STACKS_SIGNAL; returns what ends the log.

    What cannot be written is left out, as on a node that does not see the run folder: a log is not worth a run.
    """
    try:
        if not folder.parent.is_dir():
            return lambda: None
        folder.mkdir(exist_ok=True)
        handler = RotatingFileHandler(folder / f"{name}.jsonl", maxBytes=MAX_BYTES, backupCount=1)
        stacks = (folder / f"{name}.stacks").open("a")
    except OSError:
        return lambda: None
    handler.setFormatter(JsonLines(name))
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    end = _attach(handler)
    with suppress(ValueError, RuntimeError, AttributeError):
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        faulthandler.enable(file=stacks)
        # kept open until the process ends: the signal's handler writes to its descriptor
        _open[name] = stacks
    fields = {"run": run, "pid": os.getpid(), "host": socket.gethostname(), "stacks": name in _open}
    logging.getLogger(__name__).info("%s begins", name, extra={"fields": fields})
    return end


def _attach(handler: logging.Handler) -> Callable[[], None]:
    """Hand records of our loggers from INFO on to `handler`; other handlers get no more than before."""
    root = logging.getLogger()
    levels: list[tuple[logging.Handler | logging.Logger, int]] = [(one, one.level) for one in root.handlers]
    for other in root.handlers:
        other.setLevel(max(other.level, root.level))
    root.addHandler(handler)
    for ours in map(logging.getLogger, OURS):
        if ours.level == logging.NOTSET:
            levels.append((ours, ours.level))
            ours.setLevel(logging.INFO)

    def end() -> None:
        root.removeHandler(handler)
        handler.close()
        for one, level in levels:
            one.setLevel(level)

    return end
