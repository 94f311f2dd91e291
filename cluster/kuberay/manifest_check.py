"""Compares a manifest for KubeRay with the pods that a config needs, and names what does not fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ...core.errors import ConfigError, PlacementError, one_line
from ..plan.memory_plan import gib
from ..plan.topology import POOL_LABEL
from .pool_pods import SAFE_SHARE, PodSize, PoolPods, RunPods

_UNITS = {
    "": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40,
}  # fmt: skip
_GPU = "nvidia.com/gpu"
_SPEC_KEYS = {"RayCluster": (), "RayJob": ("rayClusterSpec",), "RayService": ("rayClusterConfig",)}
_MAX_BYTES = 1 << 22


def require_manifest(path: Path, pods: RunPods) -> None:
    """Require that a RayJob or RayCluster can hold the run. Raises PlacementError naming everything that does not fit.

    Raises ConfigError for a file that holds no such manifest.
    """
    name, spec = _read_cluster_spec(path)
    faults = list(_faults(spec, pods))
    if faults:
        raise PlacementError(
            f"{name} of {path} does not fit the config: {' | '.join(faults)}; mend them, or write it anew with "
            "`rlhfspec kube render`"
        )


def quantity(text: object) -> float:
    """The number of a Kubernetes quantity such as `500m` or `8Gi`. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)([A-Za-z]*)", str(text).strip())
    if found is None or found[2] not in _UNITS:
        raise ConfigError(
            f"'{text}' is no quantity of Kubernetes; expected a number, or one with a unit as 500m, 8Gi"
        )
    return float(found[1]) * _UNITS[found[2]]


def _read_cluster_spec(path: Path) -> tuple[str, dict[str, Any]]:
    """Name and cluster spec of the one Ray manifest in a file."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size:,} bytes; expected a manifest of a few pages")
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot read the manifest {path}: {error.strerror}; check --manifest") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no valid YAML: {one_line(str(error))}") from None
    found = [each for each in documents if isinstance(each, dict) and each.get("kind") in _SPEC_KEYS]
    if len(found) != 1 or found[0]["kind"] == "RayService":
        kinds = ", ".join(str(each["kind"]) for each in found) or "neither"
        raise ConfigError(f"{path}: expected one RayJob or RayCluster, got {kinds}")
    spec: Any = found[0].get("spec")
    for key in _SPEC_KEYS[found[0]["kind"]]:
        spec = spec.get(key) if isinstance(spec, dict) else None
    if not isinstance(spec, dict):
        raise ConfigError(
            f"{path}: the {found[0]['kind']} says nothing of its cluster; expected a spec with groups"
        )
    return f"{found[0]['kind']} {_at(found[0], 'metadata', 'name')}", spec


def _faults(spec: dict[str, Any], pods: RunPods) -> Iterator[str]:
    if _at(spec, "authOptions", "mode") != "token":
        yield "authOptions.mode is not token: whoever reaches the head may run code"
    if any(pool.least_pods < pool.num_pods for pool in pods.pools) and not spec.get(
        "enableInTreeAutoscaling"
    ):
        yield "enableInTreeAutoscaling is off, and cluster.generation.max_actors lets the pool grow"
    yield from _head_faults(_mapping(spec.get("headGroupSpec")), pods)
    listed = spec.get("workerGroupSpecs")
    groups = {
        str(_at(group, "labels", POOL_LABEL)): group for group in (listed if isinstance(listed, list) else [])
    }
    for pool in pods.pools:
        group = groups.get(pool.pool)
        if group is None:
            yield f"no worker group has the label {POOL_LABEL}: {pool.pool}"
            continue
        try:
            yield from (f"group {pool.pool}: {fault}" for fault in _group_faults(group, pool))
        except ConfigError as error:
            yield f"group {pool.pool}: {error}"


def _head_faults(head: dict[str, Any], pods: RunPods) -> Iterator[str]:
    try:
        have = _pod_size(head)
    except ConfigError as error:
        yield f"head: {error}"
        return
    if have.ray_cpus:
        yield f"head: num-cpus is {have.ray_cpus}; expected '0', so that no actor stands beside the GCS"
    yield from (f"head: {fault}" for fault in _memory_faults(have, pods.head_bytes, pods.head.store_bytes))


def _group_faults(group: dict[str, Any], pool: PoolPods) -> Iterator[str]:
    have = _pod_size(group)
    largest = pool.largest
    if largest.num_gpus and have.gpus < largest.num_gpus:
        yield f"{have.gpus} GPU a pod, an actor wants {largest.num_gpus:g}; set {_GPU}"
        return
    num_here = pool.fit(have.ray_cpus, have.gpus)
    if num_here < 1:
        wants = largest.resources()["CPU"] + pool.extra_cpus
        yield f"Ray sees {have.ray_cpus} CPUs a pod, an actor wants {wants:g} (the scheduler's share with it)"
        return
    replicas = int(quantity(group.get("maxReplicas", 0)))
    if replicas * num_here < pool.num_actors:
        yield (
            f"at most {replicas} pods of {num_here} actors, the plan has {pool.num_actors} actors; raise maxReplicas"
        )
    threads = min(num_here, pool.num_actors) * largest.num_threads * largest.num_ranks
    if have.cores < threads:
        yield f"{have.cores} cores, its actors use {threads} threads"
    yield from _memory_faults(have, pool.bytes_of(num_here), pool.store_bytes)


def _memory_faults(have: PodSize, needed: int, store: int) -> Iterator[str]:
    if have.memory_bytes * SAFE_SHARE < needed:
        yield f"{gib(have.memory_bytes)} of memory, the plan has {gib(int(needed / SAFE_SHARE))}"
    if have.store_bytes < store:
        yield f"{gib(have.store_bytes)} of shared memory for objects, the plan has {gib(store)}"


def _pod_size(group: dict[str, Any]) -> PodSize:
    """What a group says of its pods. Raises ConfigError for what is missing."""
    spec = _at(group, "template", "spec")
    containers = _at(spec, "containers")
    if not isinstance(containers, list) or not containers:
        raise ConfigError("it has no container")
    limits, requests = (_mapping(_at(containers[0], "resources", key)) for key in ("limits", "requests"))
    if not {"cpu", "memory"} <= limits.keys():
        raise ConfigError("its container has no limits of cpu and memory; the plan needs both")
    if limits != requests:
        raise ConfigError(
            f"requests {requests} differ from limits {limits}: what was not asked for may be taken"
        )
    parameters = _mapping(group.get("rayStartParams"))
    cores = quantity(limits["cpu"])
    gpus = quantity(parameters.get("num-gpus", limits.get(_GPU, 0)))
    listed = _at(spec, "volumes")
    volumes = listed if isinstance(listed, list) else []
    shared = [
        _at(each, "emptyDir", "sizeLimit") for each in volumes if _at(each, "emptyDir", "medium") == "Memory"
    ]
    # without a size Ray takes a part of the pod's memory, at least as much as the plan's in any pod that fits it
    store = quantity(parameters.get("object-store-memory", "0"))
    if shared and shared[0] is not None:
        store = min(store, quantity(shared[0]))
    return PodSize(
        cores=int(cores),
        memory_bytes=int(quantity(limits["memory"])),
        gpus=int(min(gpus, quantity(limits.get(_GPU, 0)))),
        ray_cpus=int(quantity(parameters.get("num-cpus", cores))),
        store_bytes=int(store),
    )


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _at(tree: object, *keys: str) -> Any:
    """The value at a path of keys, None where there is none."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree
