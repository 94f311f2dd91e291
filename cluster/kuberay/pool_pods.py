"""The pods of a run on Kubernetes: one worker group a pool, as large as its actors by placement and memory plan.

A pod holds as many actors of its pool as Ray would put there, since Ray places by CPUs and GPUs and not by memory.
Every pod has an object store that holds what is published, and Ray's own processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...core.errors import ConfigError
from ..plan.memory_plan import (
    MIB,
    PLAIN_PROCESS_BYTES,
)
from ..plan.remote_plan import RemotePlan
from ..plan.topology import PlacementSlot, Topology

WORKER_RAY_BYTES = 400 * MIB
"Raylet and its two agents, of a node that is not the head."
SAFE_SHARE = 0.95
"Of a pod's memory: above it Ray ends actors."
_MEMORY_STEP = 256 * MIB
_SLACK = 1e-6
IDLE_TIMEOUT_S = {"generation": 120, "reward": 300, "environment": 300, "trainer": 600}
"Of a pool's nodes in an interactive cluster: the longer their actors take to start, the longer."


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSize:
    """What one pod has: of Kubernetes cores, memory and GPUs, of Ray CPUs."""

    cores: int
    memory_bytes: int
    gpus: int
    ray_cpus: int
    "what Ray places by; 0 takes no actor"
    store_bytes: int
    "of Ray's object store, in shared memory; a part of the memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPods:
    """The worker group of one pool."""

    pool: str
    num_actors: int
    "at most"
    least_pods: int
    "that the run always has"
    largest: PlacementSlot
    "the actors of a pool are alike; the scheduler, beside the trainers, is smaller"
    actor_bytes: int
    extra_cpus: float
    "of the scheduler, in one of the pods"
    extra_bytes: int
    store_bytes: int
    num_pods: int
    pod: PodSize

    def fit(self, ray_cpus: float, gpus: float) -> int:
        """How many actors Ray would put on a node of that size, the scheduler beside them."""
        return _fit(self.largest, ray_cpus - self.extra_cpus, gpus, self.num_actors)

    def bytes_of(self, num_actors: int) -> int:
        """What a pod with so many actors holds by the plan."""
        return num_actors * self.actor_bytes + self.extra_bytes + self.store_bytes + WORKER_RAY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPods:
    """Every pod of a run: the head without actors, and a worker group for each pool."""

    head: PodSize
    head_bytes: int
    "what the head holds by the plan"
    pools: tuple[PoolPods, ...]


def plan_pods(plan: RemotePlan) -> RunPods:
    """Size the pods of a run. Raises ConfigError: the pools are to share one node."""
    topology, memory = plan.topology, plan.memory
    if topology.strategy == "STRICT_PACK":
        raise ConfigError(
            "cluster.placement STRICT_PACK wants all actors on one node, and on Kubernetes each pool has nodes of its "
            "own; take PACK"
        )
    head_bytes = memory.ray_bytes + memory.object_store_bytes
    head_cores = max(2, plan.profile_threads)
    if plan.profile_threads:
        # the process that starts the run, on the head, loads the pair and measures it as an instance would
        head_bytes += memory.generation_bytes
    actor_bytes = {
        "generation": memory.generation_bytes,
        "reward": memory.reward_bytes,
        "environment": memory.environment_bytes // max(1, len(topology.environment)),
        "trainer": memory.trainer_bytes,
    }
    return RunPods(
        head=_pod(cores=head_cores, needed=head_bytes, gpus=0, ray_cpus=0, store=memory.object_store_bytes),
        head_bytes=head_bytes,
        pools=tuple(
            _pool_pods(pool, topology, actor_bytes[pool], memory.object_store_bytes)
            for pool in topology.pools
        ),
    )


def _pool_pods(pool: str, topology: Topology, actor_bytes: int, store_bytes: int) -> PoolPods:
    actors = [place for place in topology.pools[pool] if place is not topology.scheduler]
    num_first = len(actors)
    if pool == "generation":
        actors += [topology.added(num_first + number) for number in range(topology.num_added)]
    largest, spreads = actors[0], topology.strategy == "STRICT_SPREAD"
    scheduler = topology.scheduler.num_cpus if pool == "trainer" else 0.0
    ray_cpus = math.ceil(largest.resources()["CPU"] + scheduler - _SLACK)
    gpus = math.ceil(largest.num_gpus - _SLACK)
    num_here = 1 if spreads else _fit(largest, ray_cpus - scheduler, gpus, len(actors))
    # spread strictly, the scheduler has a node of its own too
    num_pods = len(topology.pools[pool]) if spreads else math.ceil(len(actors) / num_here)
    extra_bytes = PLAIN_PROCESS_BYTES if scheduler else 0
    needed = num_here * actor_bytes + extra_bytes + store_bytes + WORKER_RAY_BYTES
    return PoolPods(
        pool=pool,
        num_actors=len(actors),
        least_pods=num_pods if num_first == len(actors) else math.ceil(num_first / num_here),
        largest=largest,
        actor_bytes=actor_bytes,
        extra_cpus=scheduler,
        extra_bytes=extra_bytes,
        store_bytes=store_bytes,
        num_pods=num_pods,
        pod=_pod(
            cores=max(ray_cpus, num_here * largest.num_threads * largest.num_ranks),
            needed=needed,
            gpus=gpus,
            ray_cpus=ray_cpus,
            store=store_bytes,
        ),
    )


def _fit(place: PlacementSlot, cpus: float, gpus: float, most: int) -> int:
    fits = [cpus / place.resources()["CPU"]] + ([gpus / place.num_gpus] if place.num_gpus else [])
    return min(most, math.floor(min(fits) + _SLACK))


def _pod(*, cores: int, needed: int, gpus: int, ray_cpus: int, store: int) -> PodSize:
    return PodSize(
        cores=cores,
        memory_bytes=math.ceil(needed / SAFE_SHARE / _MEMORY_STEP) * _MEMORY_STEP,
        gpus=gpus,
        ray_cpus=ray_cpus,
        store_bytes=store,
    )
