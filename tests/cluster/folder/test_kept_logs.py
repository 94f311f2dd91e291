"""Logs of actors that were replaced do not pile up."""

from __future__ import annotations

import os
from pathlib import Path

from rlhfspec.cluster.folder.leftovers import WRITTEN_S, drop_old_logs

NOW = 1_000_000.0


def test_the_logs_that_were_written_to_last_are_kept_and_all_of_the_last_hour(tmp_path: Path) -> None:
    for number in range(8):
        path = tmp_path / f"gen-0-r{number}.jsonl{'.1' if number % 2 else ''}"
        path.touch()
        changed = NOW - WRITTEN_S - 100.0 + number if number < 6 else NOW - 1.0
        os.utime(path, (changed, changed))
    drop_old_logs(tmp_path, now=NOW, most=4)
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {
        f"gen-0-r{n}" for n in range(4, 8)
    }
    drop_old_logs(tmp_path, now=NOW, most=1)
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {"gen-0-r6", "gen-0-r7"}
    drop_old_logs(tmp_path / "none", now=NOW)
