"""A forward's plan as it is sent to the other ranks of a group: what it says of tokens, without pool and attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention.backends import Attention
from ..attention.packing import RaggedRows
from ..cache.kv_pool import KVPool
from .compute_backend import PoolAttention
from .forward_plan import ForwardPlan, TreePlan
from .prefill_plan import PrefillPlan


def as_sent(plan: ForwardPlan) -> dict[str, Any]:
    """Return what a plan says, in arrays. Raises TypeError for a plan of another kind."""
    if isinstance(plan, PrefillPlan):
        return {"pieces": plan.pieces}
    if not isinstance(plan, TreePlan):
        raise TypeError(f"expected a plan of a tree or a prefill, got {type(plan).__name__}")
    return {
        "base": _array(plan.base),
        "num_tokens": plan.num_tokens,
        "num_earlier": plan.num_earlier,
        "seen": _array(plan.seen),
        "depth": _array(plan.depth),
        "view_tokens": plan.view_tokens,
        "counts": None if plan.ragged is None else plan.ragged.counts,
    }


def as_planned(sent: dict[str, Any], pool: KVPool, attention: Attention | PoolAttention) -> ForwardPlan:
    """Return the same plan over another rank's view of the pool."""
    if "pieces" in sent:
        return PrefillPlan(pool=pool, attention=attention, pieces=sent["pieces"])
    counts = sent["counts"]
    return TreePlan(
        pool=pool,
        attention=attention,
        base=torch.from_numpy(sent["base"]),
        num_tokens=sent["num_tokens"],
        num_earlier=sent["num_earlier"],
        seen=_tensor(sent["seen"]),
        depth=_tensor(sent["depth"]),
        view_tokens=sent["view_tokens"],
        ragged=None if counts is None else RaggedRows.of(counts, pool.device),
    )


def _array(tensor: Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.numpy()


def _tensor(array: np.ndarray | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)
