"""The device of an actor: what Ray assigned to it, never what the machine happens to have.

Ray hides the other GPUs from an actor that has one, and hides none from an actor that has none. So an actor's GPU is
CUDA's first in every thread of it, also beside frameworks that have Ray hide none (`HIDING`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import ray

from ...core.errors import ConfigError, PlacementError

if TYPE_CHECKING:
    import torch

INSTANCE_ADVICE = (
    "set engine.kv_cache_mb, lower engine.max_running_samples or engine.graph_memory_mb, or raise "
    "cluster.generation.num_gpus"
)
TRAINER_ADVICE = (
    "lower trainer.max_tokens_per_forward, set trainer.lora or trainer.gradient_checkpointing, or share the model: "
    "cluster.trainer.num_actors with trainer.strategy: fsdp2"
)

HIDING = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}
"Of an actor's environment, whatever its cluster was started with."

CUDA_CONTEXT_BYTES = 600 << 20
"Of a GPU, for each process: context, kernels and the libraries' workspaces. Taken from reports, not measured here."


def assigned_gpus() -> tuple[str, ...]:
    """Ids of the GPUs that Ray assigned to this actor; none outside Ray."""
    if not ray.is_initialized():
        return ()
    return tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))


def resolve_device(
    wish: Literal["auto", "cpu", "cuda"], *, assigned: Sequence[str], key: str, pool: str
) -> torch.device:
    """Return the device to work on: with `auto` the assigned GPU, or the CPU where none is assigned.

    Args:
        wish: the setting.
        assigned: ids of the GPUs that Ray assigned to this actor.
        key: the setting's name, for errors.
        pool: the section of the config that asks for GPUs, for errors.

    Raises:
        ConfigError: CUDA is asked for and no GPU is assigned, or torch cannot use the one that is.
    """
    # imported here so that an actor without a model does not wait for torch
    import torch

    if wish == "cpu" or (wish == "auto" and not assigned):
        return torch.device("cpu")
    if not assigned:
        raise ConfigError(f"{key} is cuda but Ray assigned no GPU; set {pool}.num_gpus=1, or {key}=auto")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"Ray assigned GPU {assigned[0]}, but torch {torch.__version__} sees no CUDA device here; install a CUDA "
            f"build of torch, or set {pool}.num_gpus=0"
        )
    return torch.device("cuda", _index(assigned[0]))


def take_gpu_share(
    who: str, device: torch.device, *, needed_bytes: int, share: float, advice: str, mapped_bytes: int = 0
) -> int:
    """Hold this actor to its share of a GPU; how many bytes of it the plan leaves, 0 where there is none.

    Raises PlacementError where it plans to take more, or more than is free.

    Asked on the actor's own node, before it builds: the CUDA context exists by then, so it is no part of the need.
    Actors that share a GPU and build at once see the same free bytes, hence the share. Nobody then reaches into
    another's, so that what a turn frees stays with torch for the next turn: giving it back and taking it again both
    wait for the device.

    Args:
        who: the actor's name.
        device: that it works on; a CPU has no limit here.
        needed_bytes: from the memory plan; 0: not estimated.
        share: of a GPU that is this actor's, 1 or more: whole ones.
        advice: what to change.
        mapped_bytes: of the share, what is taken past torch's allocator (pages of caches).
    """
    if device.type != "cuda":
        return 0
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    own_bytes = int(min(share, 1.0) * total_bytes)
    if needed_bytes > min(free_bytes, own_bytes):
        needed, free, total, own = (
            f"{size / 2**30:.2f} GiB" for size in (needed_bytes, free_bytes, total_bytes, own_bytes)
        )
        raise PlacementError(
            f"{who} plans to take {needed} of GPU {device.index}, which has {free} of {total} free; its share is "
            f"{own}; {advice}"
        )
    if share < 1.0:
        held_bytes = max(own_bytes - CUDA_CONTEXT_BYTES - mapped_bytes, 0)
        torch.cuda.set_per_process_memory_fraction(held_bytes / total_bytes, device)
    left_bytes = min(free_bytes, own_bytes - CUDA_CONTEXT_BYTES) - needed_bytes
    return max(left_bytes, 0) if needed_bytes else 0


def gpu_seat(device: torch.device) -> str | None:
    """Name the GPU among all of the cluster, so that equal names are one GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    return f"GPU {assigned_gpus()[0]} of node {ray.get_runtime_context().get_node_id()[:12]}"


def _index(gpu: str) -> int:
    """Torch's number of a GPU: its place among the visible ones, which Ray sets to the assigned ones."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return visible.index(gpu) if visible else int(gpu)


def reward_device() -> str:
    """The GPU that Ray assigned (cluster.reward.num_gpus), else the CPU. Raises ConfigError."""
    gpus = assigned_gpus()
    if not gpus:
        return "cpu"
    return str(resolve_device("auto", assigned=gpus, key="reward.kind", pool="cluster.reward"))
