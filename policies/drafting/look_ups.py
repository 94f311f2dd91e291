"""The law of gain over cost for drafts that are looked up: they cost next to nothing, so only verification is weighed.

A look-up proposes long chains now and then, and mostly nothing. So nothing is planned: every step is looked up, and of
what was found the nodes are verified that maximise (`policies.drafting.node_search`)

    sum of p  -  g * verify_s            p: estimated acceptance of a node's path; g: tokens a second, at best

with g what the batch yields: plain decoding's rate, times what drafts gained of late. What look-ups and their
verification took and saved is summed; while that is a loss, decoding is plain for longer and longer, and a few steps
try again: a drafter that never helps costs a hundredth of the time or less.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ...core.decode_records import PLAIN, Budget, DecodeState, StepRecord
from ...profiles.profile import Profile
from .cost_view import BatchCosts, CostView, step_at
from .node_search import best_nodes
from .trials import MEMORY_STEPS, Trials

MOST_GAIN = 4.0
ODD_SHARE = 0.1
"Of a plain step, by which a verification may be slower than twice what was expected and still count whole."
COST_STEP = 0.05
"How fast the correction of predicted seconds follows."


class LookUps:
    """What look-ups are worth where nothing is computed."""

    def __init__(self, profile: Profile, *, max_nodes: int, max_depth: int) -> None:
        """Arguments as of `AdaptiveDrafting`; the profile's costs of drafting are not looked at."""
        self.max_nodes = max_nodes
        self._max_depth = max_depth
        self._costs_of = lru_cache(256)(
            lambda num_samples: BatchCosts(
                profile.cost, num_samples=num_samples, width=1, max_nodes=max_nodes, max_levels=1
            )
        )
        self._view: CostView | None = None
        self._slower = 1.0
        "seconds of verification over those predicted"
        self._gain = 1.0
        "tokens a second over plain decoding's, of late"
        self._trials = Trials()

    def plan(self, state: DecodeState) -> Budget:
        """Return a refined budget of everything that may be verified, or plain decoding."""
        room = min(self._max_depth, self.max_nodes, state.max_remaining_tokens - 1)
        if room < 1:
            return PLAIN
        if self._trials.is_paused(state.decode_step):
            return _paused(self._trials.pause_steps)
        self._view = self._costs_of(state.num_samples).at(state.context_tokens)
        return _looked_up(room, self.max_nodes)

    def select(self, scores: np.ndarray) -> np.ndarray:
        """Return each sample's number of nodes, of chains with path scores [B, L]."""
        view = self._view
        assert view is not None, "a plan comes first"
        rate = max(self._gain, 1.0) * view.num_samples / float(view.uniform_s[0])
        if scores.max(initial=0.0) <= rate * step_at(view.tokens_s, 0):
            return np.zeros(len(scores), dtype=np.int64)
        counts, _ = best_nodes(scores[:, : self.max_nodes], view, rate)
        return np.minimum(counts, np.count_nonzero(scores > 0.0, axis=1))

    def observe(self, record: StepRecord) -> None:
        """Sum what look-ups saved and took."""
        if record.budget.is_plain or self._view is None:
            return
        view, draft = self._view, record.draft
        plain_s = self._slower * float(view.uniform_s[0])
        widest = 0 if draft is None else int(draft.num_nodes.max())
        total = 0 if draft is None else int(draft.num_nodes.sum())
        if not total:
            ratio = (record.step_s - record.draft_s) / max(plain_s, 1e-9)
            self._slower *= float(np.clip(ratio, 0.8, 1.25)) ** COST_STEP
        spent_s = record.draft_s
        if total:
            expected_s = self._slower * float(view.tokens_s[total] + view.widest_s[widest] - view.widest_s[0])
            # what was measured counts, but for the odd step that another process has held up
            measured_s = record.step_s - record.draft_s - plain_s
            spent_s += float(np.clip(measured_s, 0.5 * expected_s, 2.0 * expected_s + ODD_SHARE * plain_s))
        saved_s = plain_s * max(record.num_emitted_tokens / record.num_samples - 1.0, 0.0)
        gained = 1.0 + (saved_s - spent_s) / plain_s
        self._gain += (min(max(gained, 0.0), MOST_GAIN) - self._gain) / MEMORY_STEPS
        self._trials.tried(record.decode_step, saved_s=saved_s, spent_s=spent_s)


@lru_cache
def _looked_up(depth: int, max_nodes: int) -> Budget:
    return Budget(
        num_nodes=max_nodes, depth=depth, branching=1, width=1, reason="what is looked up", refined=True
    )


@lru_cache
def _paused(steps: int) -> Budget:
    return Budget(
        num_nodes=0,
        depth=0,
        branching=0,
        width=0,
        reason=f"look-ups do not pay: tried again in {steps} steps",
    )
