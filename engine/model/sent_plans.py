"""A forward's plan as it is sent to the other ranks of a group: what it says of tokens, without pool and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..attention.backends import Attention
from ..attention.packing import RaggedRows
from ..cache.kv_pool import KVPool
from .compute_backend import PoolAttention
from .forward_plan import ForwardPlan, TreePlan
from .prefill_plan import PrefillPlan


def as_sent(plan: ForwardPlan) -> tuple[dict[str, Any], list[Tensor]]:
    """Return what a plan says, on the host and on the device. Raises TypeError for a plan of another kind."""
    if isinstance(plan, PrefillPlan):
        return {"pieces": plan.pieces}, []
    if not isinstance(plan, TreePlan):
        raise TypeError(f"expected a plan of a tree or a prefill, got {type(plan).__name__}")
    on_host = {
        "num_tokens": plan.num_tokens,
        "num_earlier": plan.num_earlier,
        "view_tokens": plan.view_tokens,
        "counts": None if plan.ragged is None else plan.ragged.counts,
        "has": [name for name in _TENSORS if getattr(plan, name) is not None],
    }
    return on_host, [getattr(plan, name) for name in on_host["has"]]


def as_planned(
    sent: dict[str, Any], tensors: Sequence[Tensor], pool: KVPool, attention: Attention | PoolAttention
) -> ForwardPlan:
    """Return the same plan over another rank's pool."""
    if "pieces" in sent:
        return PrefillPlan(pool=pool, attention=attention, pieces=sent["pieces"])
    said = dict[str, Any](sent)
    said.update(zip(said.pop("has"), tensors, strict=True))
    counts = said.pop("counts")
    ragged = None if counts is None else RaggedRows.of(counts, pool.device)
    return TreePlan(pool=pool, attention=attention, ragged=ragged, **said)


_TENSORS = ("base", "seen", "depth")
