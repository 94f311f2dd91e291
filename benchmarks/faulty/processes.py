"""The actors of a running command, found as a stranger finds them: by their processes' names below the driver's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

POOLS: Mapping[str, str] = {
    "generation": "GenerationActor",
    "reward": "RewardActor",
    "scheduler": "SchedulerActor",
    "trainer": "TrainerActor",
}
"Pool: the class that Ray writes into the process' title, `ray::CLASS.method` while it works."
_PPID_FIELD = 1
"Of /proc/PID/stat after the command's closing bracket."


def serving_actors(driver: int) -> dict[str, set[int]]:
    """Process ids by pool of all actors below a driver that have been built."""
    below, titles = descendants(driver), {}
    for pid in below:
        with suppress(OSError):
            titles[pid] = (
                (Path("/proc") / str(pid) / "cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
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
    """Whether a process has ended, and nobody has asked how."""
    try:
        return _stat(pid)[0] == "Z"
    except (OSError, IndexError):
        return True


def descendants(root: int) -> set[int]:
    """All processes below one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                children.setdefault(int(_stat(int(entry.name))[_PPID_FIELD]), []).append(int(entry.name))
    found, left = set(), [root]
    while left:
        for child in children.get(left.pop(), ()):
            if child not in found:
                found.add(child)
                left.append(child)
    return found


def _stat(pid: int) -> list[str]:
    text = (Path("/proc") / str(pid) / "stat").read_text(errors="replace")
    return text[text.rindex(")") + 1 :].split()
