"""The other ranks of a group, as processes: `python -m tests.helpers.rank_processes STORE RANK RANKS`."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed

from rlhfspec.engine.group.follower import Follower
from rlhfspec.engine.group.ranks import GroupRanks

_distributed: Any = torch.distributed
_ProcessGroupGloo = _distributed.ProcessGroupGloo
TIMEOUT = timedelta(seconds=600)


def joined(store: str, rank: int, ranks: int) -> GroupRanks:
    """This process's end of a group that meets at a file."""
    options = _ProcessGroupGloo._Options()
    options._devices = [_ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads, options._timeout = 1, TIMEOUT
    group = _ProcessGroupGloo(_distributed.FileStore(store, ranks), rank, ranks, options)
    return GroupRanks(group, instance="gen-0", timeout_s=TIMEOUT.total_seconds())


class RankProcesses:
    """A group whose leader is this process."""

    def __init__(self, folder: Path, ranks: int) -> None:
        store = str(folder / f"store_{ranks}")
        command = [sys.executable, "-m", "tests.helpers.rank_processes", store]
        self.followers = [
            subprocess.Popen([*command, str(rank), str(ranks)], stderr=subprocess.PIPE, text=True)
            for rank in range(1, ranks)
        ]
        self.ranks = joined(store, 0, ranks)

    def stop(self) -> None:
        """End them. Raises AssertionError: one did not end well."""
        self.ranks.order("stop")
        self.ranks.close()
        for follower in self.followers:
            _, said = follower.communicate(timeout=TIMEOUT.total_seconds())
            assert follower.returncode == 0, said

    def kill(self) -> None:
        """End what still runs."""
        for follower in self.followers:
            follower.kill()
            follower.communicate()


if __name__ == "__main__":
    Follower(joined(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))).follow()
