"""`status.json`: what a run is doing, by whom, and when it last gave a sign of life.

One page of fixed size, reserved when the run begins and written in place by one call: a disk that fills up later
cannot freeze it. The heartbeat says that the process lives; iteration and phase say that it gets on.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from ...core.files import storage_errors, write_whole
from .owner import ProcessIdentity

SCHEMA_VERSION = 1
STATUS_BYTES = 4096
HEARTBEAT_S = 5.0
STALE_AFTER_S = 60.0
"A heartbeat of another machine that is older: clocks differ a little, network file systems lag."

STOPPING = "stopping"
"Told to end by SIGTERM, and not through with it: `interrupted` once Ray and the actors are down."
LIVING = ("running", STOPPING)
"States of a process that is there, or has been killed."

_READS = 3
_READ_AGAIN_S = 0.05


class Status(TypedDict):
    """Keys of `status.json`; runs before schema version 1 have only the first two."""

    state: str
    reason: str
    schema_version: NotRequired[int]
    pid: NotRequired[int]
    host: NotRequired[str]
    pid_started: NotRequired[int | None]
    pid_namespace: NotRequired[str | None]
    iteration: NotRequired[int | None]
    "in progress, counted from 0 like in metrics.jsonl; None before the first"
    phase: NotRequired[str]
    heartbeat: NotRequired[str]
    "UTC, ISO 8601"


class StatusWriter:
    """Of one run. Safe to call from threads and from a signal handler of the main thread."""

    def __init__(self, path: Path, may_write: Callable[[], bool] = lambda: True) -> None:
        """Nothing is written where `may_write` says no."""
        self._path, self._may_write = path, may_write
        # of the same thread again: a signal handler may interrupt a write
        self._lock = threading.RLock()
        self._fields: dict[str, Any] = {"state": "unknown", "reason": "", "iteration": None, "phase": ""}

    def reserve(self) -> None:
        """Make the file at its full size, state `running`. Raises StorageError."""
        self._fields["state"] = "running"
        write_whole(self._path, _page(self._fields))

    def set(self, state: str, reason: str = "") -> None:
        """Write a new state. Raises StorageError."""
        with storage_errors(self._path):
            self._write({"state": state, "reason": reason})

    def progress(self, iteration: int, phase: str) -> None:
        """Note how far the run is. What cannot be written is left out: it is not worth a run."""
        fields = {"iteration": iteration, "phase": phase}
        if fields.items() <= self._fields.items():
            return
        with suppress(OSError):
            self._write(fields)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Refresh the heartbeat every few seconds while the block runs and the state is a living one."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(HEARTBEAT_S):
                if self._fields["state"] in LIVING:
                    with suppress(OSError):
                        self._write({})

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _write(self, change: dict[str, Any]) -> None:
        with self._lock:
            # in place: a signal handler that comes in between changes other keys, or wins
            self._fields.update(change)
            while self._may_write():
                fields = dict(self._fields)
                file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
                try:
                    os.pwrite(file, _page(fields), 0)
                finally:
                    os.close(file)
                if fields == self._fields:
                    return


def _page(fields: Mapping[str, Any]) -> bytes:
    tree = {
        "state": fields["state"],
        "reason": fields["reason"],
        "schema_version": SCHEMA_VERSION,
        **ProcessIdentity.of_this().as_tree(),
        "iteration": fields["iteration"],
        "phase": fields["phase"],
        "heartbeat": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    text = json.dumps(tree)
    while len(text) >= STATUS_BYTES:
        # a character takes up to 12 bytes in JSON
        tree["reason"] = tree["reason"][: -max(1, (len(text) - STATUS_BYTES) // 12)]
        text = json.dumps(tree)
    return text.ljust(STATUS_BYTES - 1).encode() + b"\n"


def read_status(path: Path) -> Status:
    """Read `status.json`; state `unknown` and why, where there is none or it is damaged."""
    if not path.is_file():
        return {"state": "unknown", "reason": "there is no status.json"}
    for last in range(_READS - 1, -1, -1):
        try:
            tree = json.loads(path.read_bytes())
            if isinstance(tree, dict) and isinstance(tree.get("state"), str):
                if (version := tree.get("schema_version", SCHEMA_VERSION)) != SCHEMA_VERSION:
                    reason = f"status.json has schema version {version}, this version reads {SCHEMA_VERSION}"
                    return {"state": "unknown", "reason": reason}
                return cast(Status, {"reason": ""} | tree)
        except (OSError, ValueError, RecursionError):
            pass
        # it may just have been written
        if last:
            time.sleep(_READ_AGAIN_S)
    return {"state": "unknown", "reason": "status.json is damaged"}


def describe_status(status: Status, *, now: datetime | None = None) -> list[str]:
    """The state in words, first line first; `stale` where a run only seems to run, and how it may have come so."""
    state, reason = status["state"], status["reason"]
    who = ProcessIdentity.from_tree(status)
    age_s = _age_s(status, now or datetime.now(UTC))
    if state not in LIVING or who is None or age_s is None:
        return [f"state {state}" + (f": {reason}" if reason else "")]
    where = f"process {who.pid} on {who.host}"
    beat = f"last heartbeat {span(age_s)} ago, {_progress(status)}"
    if who.is_gone and state == STOPPING:
        return [f"state interrupted: {reason}; {where} was killed before it was through ({beat})"]
    if who.is_gone:
        return [
            f"state stale: status.json says running, but {where} is gone ({beat})",
            "  it was killed, or the machine restarted; what was finished is kept",
        ]
    if age_s <= STALE_AFTER_S:
        return [f"state {state}: {where} ({beat})" + (f", {reason}" if reason else "")]
    if who.is_here:
        return [
            f"state stale: {where} exists but gives no sign of life ({beat})",
            f"  it is stopped or the machine is overloaded; kill -CONT {who.pid} lets a stopped one go on",
        ]
    return [
        f"state stale: status.json says {state}, but nothing was heard of {where} ({beat})",
        f"  look on {who.host} whether it lives (ps {who.pid}), and end it there, before another goes on with the run",
    ]


def may_be_running(status: Status, *, now: datetime | None = None) -> bool:
    """Whether a run that calls itself running or stopping may be believed: nothing shows that its process is gone."""
    who = ProcessIdentity.from_tree(status)
    if status["state"] not in LIVING or who is None or who.is_gone:
        return False
    age_s = _age_s(status, now or datetime.now(UTC))
    return who.is_here or (age_s is not None and age_s <= STALE_AFTER_S)


def was_heard_of(before: Status, after: Status) -> bool:
    """Whether a run gave a sign of life between two looks."""
    return before.get("heartbeat") != after.get("heartbeat")


def _age_s(status: Status, now: datetime) -> float | None:
    try:
        return max(0.0, (now - datetime.fromisoformat(status.get("heartbeat", ""))).total_seconds())
    except (TypeError, ValueError):
        return None


def _progress(status: Status) -> str:
    iteration, phase = status.get("iteration"), status.get("phase")
    if not isinstance(iteration, int):
        return "starting, before the first iteration"
    return f"in iteration {iteration + 1}" + (f", {phase}" if phase else "")


def span(seconds: float) -> str:
    """A length of time in two figures or so; 0 where the clock of another machine is ahead."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"
