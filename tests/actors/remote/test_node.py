"""A raylet's death is known at once, and to every wait."""

import subprocess
import sys
import threading

import pytest

from rlhfspec.actors.remote.node import own_raylet, require_raylet, watching_raylet
from rlhfspec.actors.remote.waiting import get, wait_any
from rlhfspec.core.errors import NodeDied


@pytest.fixture
def child():
    """A process of our own in the raylet's place."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_raylets_death_is_reported_at_once_and_ends_every_wait(child):
    notes, said = [], threading.Event()

    def note(text: str) -> None:
        notes.append(text)
        said.set()

    with watching_raylet(child.pid, note):
        require_raylet()
        child.kill()
        assert said.wait(timeout=60)
        for wait in (
            lambda: wait_any([], timeout_s=0.0),
            lambda: get(None, waiter="the loop", waited_for="trainer", order="update", timeout_s=60.0),
        ):
            with pytest.raises(NodeDied, match="the Ray node under this process died"):
                wait()
    assert len(notes) == 1 and notes[0].startswith("Ray on this machine died")
    require_raylet()


def test_what_ray_raises_once_its_raylet_is_gone_is_the_nodes_end(child):
    said = threading.Event()
    with (
        pytest.raises(NodeDied, match="its raylet was killed or crashed"),
        watching_raylet(child.pid, lambda text: said.set()),
    ):
        child.kill()
        assert said.wait(timeout=60)
        raise ValueError("Placement group 653e does not exist.")
    with pytest.raises(ValueError, match="of another kind"), watching_raylet(own_raylet(), print):
        raise ValueError("of another kind")


def test_a_living_raylet_and_a_missing_one_are_not_reported(child):
    notes = []
    for pid in (child.pid, None):
        with watching_raylet(pid, notes.append):
            require_raylet()
    assert notes == []


@pytest.mark.ray
def test_the_raylet_of_a_private_cluster_is_found(local_ray):
    pid = own_raylet()
    assert pid is not None
    with open(f"/proc/{pid}/comm") as comm:
        assert comm.read().strip() == "raylet"
