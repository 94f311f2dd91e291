"""A process's log: whole lines, nothing held open, nothing left of what a full disk refuses."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhfspec.actors.remote import process_log, run_metrics
from rlhfspec.actors.remote.process_log import begin_process_log
from rlhfspec.core.metrics import Exported

LOGGER = logging.getLogger("rlhfspec.actors.some")


class Drops:
    """Counts what is told of dropped writes."""

    def __init__(self) -> None:
        self.num = 0.0

    def record(self, metric: Exported, value: float, labels: dict[str, str]) -> None:
        assert (metric.name, labels) == ("dropped_writes", {"file": "log"})
        self.num += value


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    end = begin_process_log(tmp_path / "logs", "gen-0", run="demo")
    yield tmp_path / "logs" / "gen-0.jsonl"
    end()


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_when_who_and_what_with_the_errors_traceback(log: Path) -> None:
    LOGGER.info("told of %d samples", 3, extra={"fields": {"figures": {"reward/mean": 0.5}}})
    try:
        raise ValueError("no such sample")
    except ValueError:
        LOGGER.exception("it failed")
    first, told, failed = lines(log)
    assert (first["pid"], first["run"]) == (os.getpid(), "demo")
    assert (told["actor"], told["level"], told["text"]) == ("gen-0", "INFO", "told of 3 samples")
    assert told["figures"] == {"reward/mean": 0.5}
    assert "ValueError: no such sample" in str(failed["error"])


def test_between_two_lines_nothing_of_the_run_folder_is_open(log: Path) -> None:
    LOGGER.info("a line")
    targets = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_open(fd)]
    assert not [target for target in targets if target.startswith(str(log.parent.parent))]


def is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_lines_that_a_full_disk_refuses_are_counted_and_leave_nothing(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drops, before, really = Drops(), log.read_bytes(), os.write
    run_metrics.begin(drops)

    def half(file: int, data: bytes) -> int:
        """As a disk that has room for a few more bytes."""
        if len(data) <= 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really(file, bytes(data)[: len(data) - 10])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        LOGGER.info("does not fit")
        LOGGER.info("nor this")
    run_metrics.begin(None)
    assert drops.num == 2 and log.read_bytes() == before
    LOGGER.info("fits again")
    assert lines(log)[-1]["text"] == "fits again"


def test_a_log_stays_below_its_limit_and_keeps_one_older_file(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_log, "MAX_BYTES", 2000)
    for number in range(50):
        LOGGER.info("line %d", number)
    files = sorted(path.name for path in log.parent.iterdir())
    assert files == ["gen-0.jsonl", "gen-0.jsonl.1"]
    assert all(path.stat().st_size <= 2000 for path in log.parent.iterdir())
    assert lines(log)[-1]["text"] == "line 49"


@pytest.mark.parametrize(
    "place", [lambda path: path / "nowhere" / "logs", lambda path: path / "file" / "logs"]
)
def test_a_node_that_does_not_see_the_run_folder_keeps_no_log(
    tmp_path: Path, place: Callable[[Path], Path]
) -> None:
    (tmp_path / "file").touch()
    begin_process_log(place(tmp_path), "gen-0", run="demo")()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
