"""Whether a trainer may compute while instances generate: only with what they would not use.

Where the two share cores or a GPU, every second of a forward that is hidden behind the rollout is a second that the
rollout takes longer, and its tail, which everything waits for, is the last to be slowed down.
"""

from __future__ import annotations

from collections.abc import Mapping

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from rlhfspec.cluster.placement.machine import num_cores
from rlhfspec.cluster.placement.topology import Topology
from rlhfspec.core.config import Config

ONE_MACHINE = ""
"Name of the node where there is only one."


def streams_forwards(
    config: Config, topology: Topology, cores_of: Mapping[int, tuple[str, float]], *, recomputes_old: bool
) -> tuple[bool, str]:
    """Whether blocks are computed during the rollout, and a line that says why; none where there is nothing to say.

    Args:
        config: of the run.
        topology: its places.
        cores_of: node and its cores, by bundle.
        recomputes_old: whether old log-probabilities are the trainer's.
    """
    algorithm, wish = config.algorithm, config.trainer.stream_forwards
    if config.rollout.max_staleness:
        # the whole update runs then
        shared = _shared(config, topology, cores_of)
        return (
            False,
            f"updates run while later batches are sampled, and slow that down: {shared}" if shared else "",
        )
    if algorithm.dynamic_sampling:
        # which samples make a block is not known before the rollout's end
        return False, ""
    if not needs_forwards(config, recomputes_old=recomputes_old):
        if wish != "on":
            return False, ""
        return False, (
            f"trainer.stream_forwards is on, but {algorithm.kind} without kl_coef computes nothing before its first "
            "step; there is nothing to stream"
        )
    shared = _shared(config, topology, cores_of)
    if wish == "off" or (wish == "auto" and shared):
        return (
            False,
            "" if wish == "off" else f"forwards before the update wait for the rollout's end: {shared}",
        )
    line = "forwards before the update are computed while the rollout's tail runs"
    return True, f"{line}, and slow it down: {shared}" if shared else line


def needs_forwards(config: Config, *, recomputes_old: bool) -> bool:
    """Whether an update computes anything before its first step."""
    return (
        config.algorithm.kl_coef > 0.0
        or config.algorithm.has_critic
        or config.trainer.scoring == "engine"
        or recomputes_old
    )


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


def _shared(config: Config, topology: Topology, cores_of: Mapping[int, tuple[str, float]]) -> str:
    """What trainers would take away from instances; empty: nothing."""
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
