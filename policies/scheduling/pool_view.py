"""Builds what a reallocation policy sees from the scheduler's log and the last polls."""

from __future__ import annotations

import numpy as np

from ..reallocation.pool_records import InstanceView, PoolView
from .ledger import Ledger
from .members import InstanceState


def pool_view(ledger: Ledger, *, max_new_tokens: int) -> PoolView:
    """Show what serves. Samples being moved are only counted; those that have not begun have no tokens."""
    return PoolView(
        now_s=ledger.now_s,
        instances=tuple(_view(name, ledger) for name in sorted(ledger.members.serving)),
        num_queued=len(ledger.waiting),
        max_new_tokens=max_new_tokens,
        warm_pairs=ledger.moves.warm_pairs,
    )


def _view(name: str, ledger: Ledger) -> InstanceView:
    member, samples, moves = ledger.members[name], ledger.samples, ledger.moves
    shown = [samples[key] for key in member.owned]
    if leaving := moves.leaving(name):
        shown = [sample for sample in shown if sample.request.key not in leaving]
    shown.sort(key=lambda sample: sample.arrival)
    is_leaving = member.state is InstanceState.LEAVING
    return InstanceView(
        instance=name,
        num_slots=0 if is_leaving else member.num_slots,
        keys=tuple(sample.request.key for sample in shown),
        response_tokens=np.array([sample.num_tokens for sample in shown], dtype=np.int64),
        context_tokens=np.array([sample.num_context_tokens for sample in shown], dtype=np.int64),
        num_arriving=moves.num_arriving(name),
        num_leaving=len(member.owned) - len(shown),
        goodput_tokens_per_s=member.load.goodput_tokens_per_s if member.load else 0.0,
        goodput_samples=member.load.goodput_samples if member.load else 0.0,
        idle_s=0.0 if member.free_since_s is None else ledger.now_s - member.free_since_s,
        is_leaving=is_leaving,
    )
