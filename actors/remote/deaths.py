"""Says in one line why another process is gone: what Ray knows of it, and no more than that."""

from __future__ import annotations

import re

from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)

DEATHS = (
    RayActorError,
    OutOfMemoryError,
    NodeDiedError,
    WorkerCrashedError,
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
)
"Errors by which Ray tells that who was asked is gone."

OWN_NODE_DIED = "Owner's node has crashed"
"In Ray's words on every actor of a driver, when the node under the driver died."

_CAUSES = (
    (r"low on memory|OUT_OF_MEMORY", "Ray ended it because the memory of its machine ran out"),
    (r"killed by `ray\.kill`", "it was ended by ray.kill"),
    (r"receives a SIGTERM", "its process was ended by SIGTERM"),
    (
        r"exits with an exit code (\d+)",
        r"its process ended itself with exit code \1 (sys.exit); its log in the Ray dashboard may say why",
    ),
    (OWN_NODE_DIED, "the Ray node of this process died"),
    (r"its node has died", "its machine, or Ray on it, died"),
    (r"placement group was removed", "its place in the cluster was taken back"),
    (
        r"actor .* is unavailable",
        "its connection broke; whether it lives, and did what it was asked, is not known",
    ),
    (
        r"connection error code",
        "its process vanished without a word: killed from outside (SIGKILL) or crashed; if the kernel ended it "
        "for memory, `dmesg` of that machine says so",
    ),
)


def cause_of(error: BaseException) -> str:
    """Return why the other side is gone, in one line."""
    text = str(error)
    if isinstance(error, OutOfMemoryError):
        return _CAUSES[0][1]
    if getattr(error, "actor_init_failed", False):
        return f"its constructor raised {text.strip().splitlines()[-1].strip()}"
    for pattern, words in _CAUSES:
        found = re.search(pattern, text)
        if found:
            return found.expand(words)
    return last_line(error)


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message that says something: Ray puts the cause there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
