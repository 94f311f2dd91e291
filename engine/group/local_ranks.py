"""A group of processes on this machine, without Ray: `python -m rlhfspec.engine.group.local_ranks STORE RANK RANKS`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhfspec.engine.group.follower import Follower
from rlhfspec.engine.group.ranks import GroupRanks, joined

TIMEOUT_S = 600.0


class LocalRanks:
    """A group whose leader is this process."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        """Start the other ranks and meet them. Raises RuntimeError: not all came."""
        store = str(folder / f"store_{num_ranks}")
        command = [sys.executable, "-m", "rlhfspec.engine.group.local_ranks", store]
        paths = os.pathsep.join(path for path in sys.path if path)
        self.followers = [
            subprocess.Popen(
                [*command, str(rank), str(num_ranks)],
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            )
            for rank in range(1, num_ranks)
        ]
        try:
            self.ranks = _join(store, 0, num_ranks)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """End them. Raises AssertionError: one did not end well."""
        self.ranks.order("stop")
        self.ranks.close()
        for follower in self.followers:
            _, said = follower.communicate(timeout=TIMEOUT_S)
            assert follower.returncode == 0, said

    def kill(self) -> None:
        """End what still runs."""
        for follower in self.followers:
            follower.kill()
            follower.communicate()


@contextmanager
def local_ranks(num_ranks: int) -> Iterator[GroupRanks | None]:
    """So many ranks, of which this process leads; None: it is the only one."""
    if num_ranks == 1:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        group = LocalRanks(Path(folder), num_ranks)
        try:
            yield group.ranks
            group.stop()
        finally:
            group.kill()


def _join(store: str, rank: int, num_ranks: int) -> GroupRanks:
    timeouts = {"start_timeout_s": TIMEOUT_S, "step_timeout_s": TIMEOUT_S}
    return joined(store, rank, num_ranks, instance="gen-0", **timeouts)


if __name__ == "__main__":
    Follower(_join(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))).follow()
