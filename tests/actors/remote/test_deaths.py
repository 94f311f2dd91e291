"""Deaths in plain words, from what Ray says of real ones; memory is blamed only where Ray does."""

import os
import signal
import sys
import time

import pytest
import ray
from ray.exceptions import OutOfMemoryError

import rlhfspec.actors.remote.waiting
from rlhfspec.actors.remote.deaths import cause_of
from rlhfspec.actors.remote.waiting import ActorDied, get
from rlhfspec.core.errors import InstanceLost, NodeDied

pytestmark = pytest.mark.ray


@ray.remote(num_cpus=0, max_restarts=0)
class Mortal:
    def exit(self) -> None:
        sys.exit(3)

    def signal(self, number: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)


@ray.remote(num_cpus=0, max_restarts=0)
class Stillborn:
    def __init__(self) -> None:
        raise ValueError("no such thing")

    def act(self) -> None: ...


def death_of(ref) -> str:
    with pytest.raises(ActorDied) as caught:
        get(ref, waiter="the loop", waited_for="gen-0", order="act", timeout_s=60.0)
    return str(caught.value)


def test_a_death_is_reported_in_one_line_with_its_cause(local_ray):
    mortals = [Mortal.remote() for _ in range(4)]
    refs = [
        mortals[0].exit.remote(),
        mortals[1].signal.remote(signal.SIGKILL),
        mortals[2].signal.remote(signal.SIGTERM),
        mortals[3].signal.remote(0),
        Stillborn.remote().act.remote(),
    ]
    ray.kill(mortals[3])
    causes = [
        "its process ended itself with exit code 3 (sys.exit)",
        "its process vanished without a word: killed from outside (SIGKILL) or crashed",
        "its process was ended by SIGTERM",
        "it was ended by ray.kill",
        "its constructor raised ValueError: no such thing",
    ]
    for ref, cause in zip(refs, causes, strict=True):
        told = death_of(ref)
        assert told.startswith(f"gen-0 died while the loop waited for 'act': {cause}") and "\n" not in told
        assert "memory" not in told or "if the kernel ended it for memory" in told


OUT_OF_MEMORY = "1 worker(s) were killed due to the node running low on memory.\nMemory on the node was 15 GB"


def answered(refs, **limits):
    """Every answer is there, to be fetched."""
    return refs, []


def raising(error: Exception):
    def fail(ref, timeout) -> None:
        raise error

    return fail


def test_an_out_of_memory_death_names_memory(monkeypatch, local_ray):
    monkeypatch.setattr(rlhfspec.actors.remote.waiting.ray, "wait", answered)
    monkeypatch.setattr(rlhfspec.actors.remote.waiting.ray, "get", raising(OutOfMemoryError(OUT_OF_MEMORY)))
    assert death_of(None).endswith("Ray ended it because the memory of its machine ran out")
    assert cause_of(ray.exceptions.RayActorError(error_msg=OUT_OF_MEMORY)) == cause_of(OutOfMemoryError("x"))


def test_an_actor_that_died_with_its_node_is_reported_as_the_nodes_death(monkeypatch, local_ray):
    said = (
        "The actor is dead because its owner has died. Worker exit detail: Owner's node has crashed.",
        "The actor is dead because its worker process has died.",
    )
    own = ray.get_runtime_context().get_node_id()
    for text, node_lives in zip(said, (True, False), strict=True):
        death = ray.exceptions.RayActorError(error_msg=text)
        monkeypatch.setattr(rlhfspec.actors.remote.waiting.ray, "wait", answered)
        monkeypatch.setattr(rlhfspec.actors.remote.waiting.ray, "get", raising(death))
        nodes = [{"NodeID": own, "Alive": node_lives}]
        monkeypatch.setattr(rlhfspec.actors.remote.waiting.ray, "nodes", lambda nodes=nodes: nodes)
        with pytest.raises(NodeDied, match="the Ray node under this process died") as caught:
            get(None, waiter="the loop", waited_for="trainer", order="update", timeout_s=60.0)
        assert not isinstance(caught.value, InstanceLost), "nobody must try to replace the actor"


def test_a_wait_for_an_actor_that_can_never_come_ends_with_the_node(monkeypatch, local_ray):
    monkeypatch.setattr(rlhfspec.actors.remote.waiting.ray, "wait", lambda refs, **limits: ([], refs))
    own = ray.get_runtime_context().get_node_id()
    monkeypatch.setattr(
        rlhfspec.actors.remote.waiting.ray, "nodes", lambda: [{"NodeID": own, "Alive": False}]
    )
    with pytest.raises(NodeDied):
        get(None, waiter="the loop", waited_for="scheduler", order="rebuild its state", timeout_s=60.0)
