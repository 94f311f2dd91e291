"""The policy: what the rule needs to know, learnt from the views of a pool; deterministic, so it can be replayed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from ..reallocation.finish_time import outlook
from ..reallocation.pool_records import PoolView
from ..reallocation.rate_curve import RateCurve
from ..reallocation.sample_arrays import flatten
from ..reallocation.survival import LengthHistory
from .forecast import Forecast
from .scaling_records import Candidate, Limits, PoolFacts, Resize, Starts
from .scaling_rule import decide, has_surplus


class ScalingPolicy:
    """Decides over one pool, view after view."""

    def __init__(self, curve: RateCurve, limits: Limits, *, can_move: bool = True) -> None:
        """`can_move`: running samples move to instances that join; else these take queued ones only."""
        self.limits = limits
        self._curve = curve
        self._can_move = can_move
        self._history = LengthHistory()
        self._surplus_since_s: float | None = None

    def note_finished(self, num_response_tokens: int) -> None:
        """A response ended with so many tokens."""
        self._history.note(num_response_tokens)

    def plan(self, view: PoolView, starts: Starts, *, may_leave: Collection[str]) -> Resize | None:
        """What to change now; None: nothing. `may_leave` names instances whose places can be given back."""
        self._observe_rates(view)
        facts = self._facts(view, starts, may_leave)
        if not has_surplus(facts, self.limits):
            self._surplus_since_s = None
        elif self._surplus_since_s is None:
            self._surplus_since_s = view.now_s
        since_s = self._surplus_since_s
        return decide(
            replace(facts, surplus_s=view.now_s - since_s if since_s is not None else 0.0), self.limits
        )

    def _facts(self, view: PoolView, starts: Starts, may_leave: Collection[str]) -> PoolFacts:
        pool = flatten(view)
        staying = [one for one in view.instances if not one.is_leaving]
        arriving = int(pool.num_arriving.sum())
        return PoolFacts(
            num_alive=len(staying),
            num_open=len(pool.instance) + arriving + view.num_queued,
            candidates=tuple(
                Candidate(
                    instance=one.instance, num_samples=one.num_running + one.num_arriving, idle_s=one.idle_s
                )
                for one in staying
                if one.instance in may_leave
            ),
            forecast=self._forecast(view),
            starts=starts,
        )

    def _forecast(self, view: PoolView) -> Forecast:
        pool = flatten(view)
        prompt_tokens = pool.context_tokens - pool.response_tokens
        expected = outlook(
            self._history.survival(view.max_new_tokens, pool.response_tokens),
            prompt_tokens=float(prompt_tokens.mean()) if len(prompt_tokens) else 0.0,
        )
        lengths = pool.response_tokens if self._can_move else pool.response_tokens[:0]
        counts = expected.counts(np.zeros(len(lengths), dtype=np.int64), lengths, 1)
        counts[:, 0] += view.num_queued
        if self._can_move and len(lengths):
            # on their way between two instances: as long as most are
            counts[0, expected.cell(np.array([int(lengths.mean())]))] += int(pool.num_arriving.sum())
        load = expected.load(counts)
        slots = [one.num_slots for one in view.instances if not one.is_leaving]
        return Forecast(
            curve=self._curve,
            cell_tokens=load.cell_tokens,
            sums=load.sums[:, 0],
            num_slots=max(max(slots, default=1), 1),
        )

    def _observe_rates(self, view: PoolView) -> None:
        """Compare goodput with its prediction where samples run."""
        reporting = [one for one in view.instances if one.goodput_tokens_per_s > 0 and len(one.keys)]
        if reporting:
            samples = np.array([one.goodput_samples for one in reporting])
            context = samples * np.array([one.context_tokens.mean() for one in reporting])
            self._curve.observe(samples, np.array([one.goodput_tokens_per_s for one in reporting]), context)
