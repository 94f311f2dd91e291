"""Whether what a run plans for has room on GPUs: in which share of one, and what would do where it has not."""

from __future__ import annotations

import math

from ...actors.remote.assigned_device import CUDA_CONTEXT_BYTES, INSTANCE_ADVICE, TRAINER_ADVICE
from ...core.errors import PlacementError
from ...engine.admission import MB
from .memory_plan import GIB, MemoryPlan, gib, listed


def require_gpu_room(
    plan: MemoryPlan, *, num_gpus: float, device_bytes: int, trainer_gpus: float = 1.0
) -> None:
    """Raise PlacementError unless an instance, and a trainer, fit into their shares of a GPU, whoever else is on it.

    Args:
        plan: of the run.
        num_gpus: GPUs of one instance; a fraction when several share one.
        device_bytes: memory of the smallest GPU.
        trainer_gpus: of one trainer.
    """
    for who, planned, parts, pool, gpus, advice in (
        ("an instance", plan.gpu_bytes, plan.gpu_parts, "generation", num_gpus, INSTANCE_ADVICE),
        ("a trainer", plan.trainer_gpu_bytes, plan.trainer_parts, "trainer", trainer_gpus, TRAINER_ADVICE),
    ):
        share, needed = int(min(gpus, 1.0) * device_bytes), planned and planned + CUDA_CONTEXT_BYTES
        if needed <= share:
            continue
        raise PlacementError(
            f"{who} needs {gib(needed)} of a GPU's memory (CUDA {CUDA_CONTEXT_BYTES / GIB:.2f}, {listed(parts)}), its "
            f"share (cluster.{pool}.num_gpus {gpus:g}) is {gib(share)} of {gib(device_bytes)}; "
            + _would_do(plan, pool, needed, share, device_bytes)
            + advice
        )


def _would_do(plan: MemoryPlan, pool: str, needed: int, share: int, device_bytes: int) -> str:
    """Which share of a GPU would do, or which limit of an instance's caches; empty: none."""
    least = math.ceil(100 * needed / device_bytes) / 100
    found = [f"cluster.{pool}.num_gpus {least:g}"] if least <= 1.0 else []
    if pool == "generation":
        # where no share would do, a whole GPU with less
        whole = ("cluster.generation.num_gpus 1 with ", 0 if found else device_bytes)
        for gpus, size in (("", share), whole):
            caches = size - needed + plan.kv_pool_bytes
            if caches - MB > plan.least_cache_bytes:
                found.append(f"{gpus}engine.kv_cache_mb {int(caches / MB)}")
                break
    return f"{' or '.join(found)} would do; " if found else ""
