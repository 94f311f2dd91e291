"""A temporary folder goes with the process that made it, however that one ends, and so does what uses it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from folder_user import user_of

from rlhfspec.cluster.folder.leftovers import end_processes, remove_with_processes, removed_when_gone

ROOT = Path(__file__).resolve().parents[3]


def test_what_uses_a_folder_is_ended_and_others_are_not(tmp_path: Path):
    mine, other = tmp_path / "mine", tmp_path / "mine-too"
    with user_of(mine) as first, user_of(mine) as second, user_of(other) as stranger:
        before = os.getcwd()
        try:
            # this process itself is none of them
            os.chdir(mine)
            end_processes(mine)
        finally:
            os.chdir(before)
        assert first.wait(10) and second.wait(10) and stranger.poll() is None
        remove_with_processes(mine)
        assert not mine.exists() and other.exists()


def test_it_is_removed_at_the_end_of_the_block_also_where_that_fails(tmp_path: Path):
    folder = tmp_path / "mine"
    folder.mkdir()
    with pytest.raises(ZeroDivisionError), removed_when_gone(folder):
        assert folder.exists()
        _ = 1 / 0
    assert not folder.exists()


HOLDING = """
import sys
from pathlib import Path
from rlhfspec.cluster.folder.leftovers import removed_when_gone
with removed_when_gone(Path(sys.argv[1])):
    print("in", flush=True)
    input()
"""


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name
)
def test_it_is_removed_when_the_process_is_killed(tmp_path: Path, number: signal.Signals):
    folder = tmp_path / "mine"
    with user_of(folder) as left:
        child = subprocess.Popen(
            [sys.executable, "-c", HOLDING, str(folder)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # tests that run in a shell's background inherit that Ctrl-C is ignored
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert child.stdout is not None and child.stdout.readline() == "in\n"
        # whoever started it may look into the folder, and is not ended
        with (folder / "looked-at").open("w"):
            child.send_signal(number)
            assert child.wait(60) != 0
            assert left.wait(60) == -signal.SIGKILL
        ends_s = time.monotonic() + 60.0
        while folder.exists():
            assert time.monotonic() < ends_s
            time.sleep(0.02)
        child.communicate()
