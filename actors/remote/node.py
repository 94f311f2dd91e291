"""The Ray node under a process: when it dies everything dies with it, and no single actor is the culprit.

A private local cluster's raylet is a child of this process and is watched as such: Ray itself takes some 15 s to
notice its death, or ends this process without a word as soon as it needs the raylet.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import ray
from ray.exceptions import RayError

from ...core.errors import NodeDied
from ...core.proc_files import PARENT, PROC, stat_fields
from .deaths import OWN_NODE_DIED

_raylet_died = threading.Event()


def require_node(death: BaseException | None = None) -> None:
    """Raise NodeDied when the node under this process is dead; `death` is what was heard of an actor."""
    if _raylet_died.is_set() or (death is not None and OWN_NODE_DIED in str(death)) or _is_marked_dead():
        raise NodeDied(
            "the Ray node under this process died: its raylet was killed or crashed, and every actor on the machine "
            "ended with it; expected it to outlive the run; see the machine's memory and `dmesg`, then start again"
        )


def require_raylet() -> None:
    """As `require_node`, without asking anybody: to be called where Ray would need the raylet."""
    if _raylet_died.is_set():
        require_node()


def _is_marked_dead() -> bool:
    with suppress(RayError):
        own = ray.get_runtime_context().get_node_id()
        return any(node["NodeID"] == own and not node["Alive"] for node in ray.nodes())
    return False


def own_raylet() -> int | None:
    """Process id of the raylet that this process has started, None where it has joined a cluster."""
    for entry in PROC.glob("[0-9]*"):
        pid = int(entry.name)
        if stat_fields(pid)[PARENT : PARENT + 1] == [str(os.getpid())]:
            with suppress(OSError):
                if (entry / "comm").read_bytes() == b"raylet\n":
                    return pid
    return None


@contextmanager
def watching_raylet(pid: int | None, note: Callable[[str], None]) -> Iterator[None]:
    """Tell `note` at once when this process ends within the block; from then on the block and `require_node` raise."""
    process = None
    if pid is not None:
        with suppress(OSError):  # an old kernel, or a sandbox that forbids it: Ray notices the death later
            process = os.pidfd_open(pid)
    if process is None:
        yield
        return
    left, leave = os.pipe()

    def look() -> None:
        either = select.poll()
        for descriptor in (process, left):
            either.register(descriptor, select.POLLIN | select.POLLHUP)
        if left not in [descriptor for descriptor, _ in either.poll()]:
            _raylet_died.set()
            note("Ray on this machine died (its raylet was killed or crashed): the run cannot go on")

    thread = threading.Thread(target=look, name="raylet-watch", daemon=True)
    thread.start()
    try:
        yield
    except Exception:  # in Ray's words
        require_raylet()
        raise
    finally:
        os.close(leave)
        thread.join()
        os.close(process)
        os.close(left)
        _raylet_died.clear()
