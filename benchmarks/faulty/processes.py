"""The actors of a running command, found as a stranger finds them: by their processes' names below the driver's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

from benchmarks.support.processes import descendants
from rlhfspec.core.proc_files import PROC, stat_fields

POOLS: Mapping[str, str] = {
    "generation": "GenerationActor",
    "reward": "RewardActor",
    "scheduler": "SchedulerActor",
    "trainer": "TrainerActor",
}
"Pool: the class that Ray writes into the process' title, `ray::CLASS.method` while it works."


def serving_actors(driver: int) -> dict[str, set[int]]:
    """Process ids by pool of all actors below a driver that have been built."""
    below, titles = descendants(driver), {}
    for pid in below:
        with suppress(OSError):
            titles[pid] = (
                (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
    return {
        pool: {
            pid
            for pid, title in titles.items()
            if re.match(rf"ray::{name}\b", title) and ".__init__" not in title and not is_zombie(pid)
        }
        for pool, name in POOLS.items()
    }


def is_zombie(pid: int) -> bool:
    """Whether a process has ended, asked how or not."""
    return stat_fields(pid)[:1] in ([], ["Z"])
