"""How often the law is asked: what it decides changes slowly, and a short decode step feels every question.

    re-plan            16 samples and more, plain decoding: every 4th step; the last plan stands in between, until the
                       number of samples changes, a response ends or the drafter is suspended
    compare shapes     every 16th step, in plain decoding every 64th; those of one width when batch or context change
    deepen             after as many levels as are hardly ever stopped
    search nodes       every 4th step, from 16 samples on every 8th; its price serves in between
    update estimators  with every re-plan; acceptance every 2nd step, costs every 16th, of plain decoding every 64th

Nothing else remembers an answer of the law's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...core.decode_records import PLAIN, Budget, DecodeState, StepRecord
from .goodput import LARGE_BATCH, GoodputPolicy
from .node_search import Allocation

UPDATE_STEPS = 4
"Of so many plain decode steps, or steps of a large batch, one re-plans and updates the estimators."
COMPARE_STEPS, PLAIN_COMPARE_STEPS = 16, 64
"All shapes are compared every so many decode steps; chain, plain and the present shape when the batch changes too."
CONTEXT_STEP = 128
"Costs are looked up again when the mean context has grown by about so many tokens."
COSTED_BITS, PLAIN_COSTED_BITS = 3, 2
"Costs are those of the next number of samples with so many leading bits: of 17 samples those of 20, or 24."
ACCEPTANCE_STEPS = 2
"Of the drafts of fewer samples one in so many updates acceptance; every one updates the watch over the drafter."
COST_STEPS, PLAIN_COST_STEPS = 16, 64
"Costs are compared with their prediction every so many decode steps, plain ones more seldom."
SEARCH_STEPS, LARGE_BATCH_SEARCH_STEPS = 4, 8
"The price of a node that a search has found serves so many decode steps."
BLIND_RISK = 0.5
"Rejections per sample risked before scores are looked at again."
MAX_BLIND_LEVELS = 16
STEADY_BATCH = 4
"From so many samples on half of the way to the planned depth goes without a question, of a large batch all of it."


class _Standing(NamedTuple):
    """A plan that is reused for a batch of so many samples."""

    num_samples: int
    budget: Budget


NOTHING = _Standing(num_samples=0, budget=PLAIN)
"No batch is that small: the law is asked."


class Cadence:
    """The goodput policy, asked and taught as often as it is worth."""

    def __init__(self, law: GoodputPolicy) -> None:
        self.max_nodes = law.max_nodes
        self.law = law
        self._step = 0
        self._standing = NOTHING
        self._compared: tuple[int, int, int] | None = None
        "batch, context and period for which shapes were compared"
        self._searched = -LARGE_BATCH_SEARCH_STEPS
        "decode step of the last search"
        self._allocation = Allocation(price=0.0)
        "the last search's"

    def plan(self, state: DecodeState) -> Budget:
        """Return the plan that stands, or the law's."""
        self._step = step = state.decode_step
        num_samples, budget = self._standing
        if (
            state.num_samples == num_samples
            and step % UPDATE_STEPS
            and state.max_remaining_tokens > budget.depth
        ):
            return budget
        law = self.law
        if law.follow(state):
            self._compared = None
        self._compare_shapes(state)
        budget = law.decide(state)
        lasts = budget.is_plain or state.num_samples >= LARGE_BATCH
        # a probe is one step, and so is the last token of the longest response
        if lasts and not law.is_probing and state.max_remaining_tokens > 1:
            self._standing = _Standing(state.num_samples, budget)
        else:
            self._standing = NOTHING
        return budget

    def deepen(self, level: int, scores: np.ndarray) -> int:
        """Return how many levels are drafted before the law is asked again; 0 where it stops the draft."""
        more = self.law.deepen(level, scores)
        return more if more <= 0 or self.law.is_probing else self._levels_unasked(level)

    def select(self, scores: np.ndarray, level_sizes: tuple[int, ...]) -> np.ndarray:
        """Return each sample's number of nodes: by a search, or by the price that the last one found."""
        law = self.law
        if law.is_probing:
            return law.select(scores, level_sizes)
        return self.choose(law.ranked(scores, level_sizes))

    def choose(self, ranked: np.ndarray) -> np.ndarray:
        """Return the numbers of nodes for scores as `GoodputPolicy.ranked` has them."""
        if self._step < self._searched + (
            SEARCH_STEPS if len(ranked) < LARGE_BATCH else LARGE_BATCH_SEARCH_STEPS
        ):
            return self._allocation.of(ranked)
        self._searched = self._step
        counts, self._allocation = self.law.search(ranked)
        return counts

    def observe(self, record: StepRecord) -> None:
        """Update what is due."""
        law, step = self.law, record.decode_step
        if record.draft is None:
            if step % UPDATE_STEPS:
                law.probes.decoded_plainly(record)
            else:
                law.observe(record, num_steps=UPDATE_STEPS, with_costs=step % PLAIN_COST_STEPS == 0)
            return
        is_large = record.num_samples >= LARGE_BATCH
        every = UPDATE_STEPS if is_large and not law.is_probing else 1
        if step % every:
            return
        law.observe(
            record,
            num_steps=every,
            with_acceptance=is_large or law.is_probing or step % ACCEPTANCE_STEPS == 0,
            with_costs=step % COST_STEPS == 0,
        )
        if law.suspended:
            self._standing = NOTHING

    def _compare_shapes(self, state: DecodeState) -> None:
        """Let the law choose where batch, context or period are others than at its last choice."""
        law, batch = self.law, state.num_samples
        before = law.chosen.choice
        drafts = before.num_nodes > 0
        costed = costed_batch(batch, COSTED_BITS if drafts else PLAIN_COSTED_BITS)
        period = state.decode_step // (COMPARE_STEPS if drafts else PLAIN_COMPARE_STEPS)
        situation = (costed, state.context_tokens // (batch * CONTEXT_STEP), period)
        if situation == self._compared:
            return
        # between periods a batch that shrinks keeps its shape: only its own costs are looked up
        all_shapes = self._compared is None or period != self._compared[2]
        self._compared = situation
        law.choose(costed, costed * state.context_tokens // batch, all_shapes=all_shapes)
        if law.chosen.choice.width != before.width:
            self._searched = -LARGE_BATCH_SEARCH_STEPS

    def _levels_unasked(self, level: int) -> int:
        """How many levels are drafted from `level` on before scores are looked at again."""
        chosen, levels = self.law.chosen, 1
        if chosen.choice.branching == 1:
            onward = float(chosen.onward[min(level, len(chosen.onward) - 1)])
            levels = int(min(max(BLIND_RISK / max(1.0 - onward, 1e-3), 1.0), MAX_BLIND_LEVELS))
        if chosen.num_samples >= STEADY_BATCH:
            ahead = chosen.choice.levels - level
            levels = max(levels, ahead if chosen.num_samples >= LARGE_BATCH else (ahead + 1) // 2)
        return levels


def costed_batch(batch: int, bits: int = COSTED_BITS) -> int:
    """The batch whose costs are looked up: at most a quarter larger, with two bits a half."""
    step = 1 << max(batch.bit_length() - bits, 0)
    return -(-batch // step) * step
