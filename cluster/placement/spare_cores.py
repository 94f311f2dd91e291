"""What updates take away from instances that generate beside them: cores, or a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from rlhfspec.cluster.placement.machine import num_cores
from rlhfspec.cluster.plan.topology import Topology
from rlhfspec.core.config import Config

ONE_MACHINE = ""
"Name of the node where there is only one."


def nodes_of(group: PlacementGroup, topology: Topology) -> dict[int, tuple[str, float]]:
    """Node and its cores of every bundle that was placed."""
    alive = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]}
    if len(alive) == 1:
        # what a local cluster says it has may be more than there is
        return {
            place.bundle: (ONE_MACHINE, min(float(num_cores()), *alive.values())) for place in topology.places
        }
    placed = placement_group_table(group)["bundles_to_node_id"]
    return {bundle: (node, alive.get(node, 0.0)) for bundle, node in placed.items()}


def shared_by_updates(config: Config, topology: Topology, cores_of: Mapping[int, tuple[str, float]]) -> str:
    """What trainers take away from instances, `cores_of` node and its cores by bundle; empty: nothing."""
    trainer = config.cluster.trainer
    on_gpu = trainer.num_gpus > 0 and config.trainer.device != "cpu"
    if on_gpu and config.trainer.scoring == "model":
        if trainer.num_gpus < 1 and config.decodes_on_gpu:
            return f"trainer and instances may share a GPU (cluster.trainer.num_gpus {trainer.num_gpus:g})"
        return ""
    busy = [*topology.generation, *topology.trainer]
    if config.reward.models and not config.cluster.reward.num_gpus:
        busy += topology.reward
    for place in topology.trainer:
        node, cores = cores_of[place.bundle]
        here = [other for other in busy if cores_of[other.bundle][0] == node]
        threads = sum(other.num_threads for other in here)
        if threads > cores and any(other in topology.generation for other in here):
            return (
                f"{place.name} shares {cores:g} cores{_on(node)} with instances, all together use {threads} threads "
                "(engine.num_threads, trainer.num_threads); lower trainer.num_threads, or give the trainer a device or "
                "a node of its own"
            )
    return ""


def _on(node: str) -> str:
    return f" of node {node[:8]}" if node else ""
