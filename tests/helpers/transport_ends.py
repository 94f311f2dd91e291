"""Instances that own a transport, one per process: what the contract tests talk to.

`Ends` answers the same calls in this process and in an actor; a call returns a future, so that a test can
hold several open.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from in_process import MemoryHub, MemoryTransport

from rlhfspec.actors.transport.select import make_transport

TIMEOUT_S = 1.2
"Of an instance that waits for what does not come."
PATIENT_S = 30.0
"Of the others: a busy machine is slow, not dead."


def frame_of(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Ends:
    """The channels of one instance, by their id."""

    def __init__(self, transport) -> None:
        self.transport = transport
        self.channels = {}

    def listen(self, peer: str):
        receiver, ticket = self.transport.listen(peer)
        self.channels[ticket.channel] = receiver
        return ticket

    def connect(self, ticket, peer: str) -> float:
        """Seconds it took."""
        began_s = time.perf_counter()
        self.channels[ticket.channel] = self.transport.connect(ticket, peer)
        return time.perf_counter() - began_s

    def send(self, ticket, seeds_and_sizes, pause_s: float = 0.0) -> None:
        """Send pseudo-random frames from one buffer each, overwritten as soon as `send` returns."""
        for seed, size in seeds_and_sizes:
            frame = frame_of(seed, size)
            self.channels[ticket.channel].send(frame)
            frame[:] = 0
            time.sleep(pause_s)

    def recv(self, ticket, seeds_and_sizes, pause_s: float = 0.0) -> list[bool]:
        """Whether each frame is what was sent."""
        equal = []
        for seed, size in seeds_and_sizes:
            into = np.empty(size, dtype=np.uint8)
            self.channels[ticket.channel].recv(into)
            equal.append(np.array_equal(into, frame_of(seed, size)))
            time.sleep(pause_s)
        return equal

    def close_channel(self, ticket) -> None:
        self.channels[ticket.channel].close()

    def close(self) -> None:
        self.transport.close()

    def footprint(self) -> tuple[int, int]:
        """Threads and open sockets of this process."""
        links = []
        for name in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{name}"))
            except OSError:
                continue
        return len(os.listdir("/proc/self/task")), sum(link.startswith("socket:") for link in links)


class LocalEnd:
    """An instance in this process."""

    def __init__(self, backend: str, hub: MemoryHub, timeout_s: float) -> None:
        if backend == "memory":
            self._ends = Ends(MemoryTransport(hub, timeout_s=timeout_s))
        else:
            import ray

            host = ray.util.get_node_ip_address()
            self._ends = Ends(make_transport(backend, host=host, timeout_s=timeout_s))
        self._threads = ThreadPoolExecutor(max_workers=16)

    def call(self, method: str, *args) -> Future:
        return self._threads.submit(getattr(self._ends, method), *args)

    def kill(self) -> None:
        self._ends.close()
        self._threads.shutdown(wait=False)


class ActorEnd:
    """An instance in a Ray actor of its own."""

    def __init__(self, backend: str, timeout_s: float) -> None:
        import ray

        self._ray = ray
        self._actor = _actor_class().options(num_cpus=0).remote(backend, timeout_s)

    def call(self, method: str, *args) -> Future:
        return self._actor.call.remote(method, *args).future()

    def kill(self) -> None:
        self._ray.kill(self._actor)


def _actor_class():
    import ray

    @ray.remote(max_restarts=0, concurrency_groups={"transfer": 4, "calls": 16})
    class EndActor:
        def __init__(self, backend: str, timeout_s: float) -> None:
            me = ray.get_runtime_context().current_actor
            host = ray.util.get_node_ip_address()
            self.ends = Ends(make_transport(backend, host=host, timeout_s=timeout_s, handle=me))

        @ray.method(concurrency_group="calls")
        def call(self, method: str, *args):
            return getattr(self.ends, method)(*args)

        @ray.method(concurrency_group="transfer")
        def deliver_frame(self, channel, sequence, frame):
            return self.ends.transport.deliver(channel, sequence, frame)

    return EndActor
