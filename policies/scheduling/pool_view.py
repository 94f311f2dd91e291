"""Builds what a reallocation policy sees from the scheduler's log and the last polls."""

from __future__ import annotations

from itertools import accumulate
from operator import attrgetter

import numpy as np

from ...core.records import SampleKey
from ..reallocation.pool_records import InstanceView, PoolView
from .ledger import Ledger
from .members import InstanceState, Member
from .open_samples import OpenSample


def pool_view(ledger: Ledger, *, max_new_tokens: int) -> PoolView:
    """Show what serves. Samples being moved are only counted; those that have not begun have no tokens."""
    leaving, serving = ledger.moves.leaving(), sorted(ledger.members.serving.items())
    shown = [_shown(member, leaving.get(name, set())) for name, member in serving]
    # arrays of all samples at once: an instance has a few, and there may be a thousand
    whole = [sample for samples in shown for sample in samples]
    response, prompt = (
        np.fromiter(map(attrgetter(name), whole), np.int64, len(whole))
        for name in ("num_tokens", "num_prompt_tokens")
    )
    context, ends = prompt + response, accumulate(map(len, shown))
    return PoolView(
        now_s=ledger.now_s,
        instances=tuple(
            InstanceView(
                instance=name,
                num_slots=0 if member.state is InstanceState.LEAVING else member.num_slots,
                keys=tuple(map(attrgetter("request.key"), samples)),
                response_tokens=response[end - len(samples) : end],
                context_tokens=context[end - len(samples) : end],
                num_arriving=ledger.moves.num_arriving(name),
                num_leaving=len(member.owned) - len(samples),
                goodput_tokens_per_s=member.load.goodput_tokens_per_s if member.load else 0.0,
                goodput_samples=member.load.goodput_samples if member.load else 0.0,
                idle_s=0.0 if member.free_since_s is None else ledger.now_s - member.free_since_s,
                is_leaving=member.state is InstanceState.LEAVING,
            )
            for (name, member), samples, end in zip(serving, shown, ends, strict=True)
        ),
        num_queued=len(ledger.waiting),
        max_new_tokens=max_new_tokens,
        warm_pairs=ledger.moves.warm_pairs,
    )


def _shown(member: Member, leaving: set[SampleKey]) -> list[OpenSample]:
    """What may be moved from there, in order of arrival."""
    samples = [sample for key, sample in member.owned.items() if not leaving or key not in leaving]
    return sorted(samples, key=attrgetter("arrival"))
