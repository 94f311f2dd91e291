"""The law over a list of proposals: a draft that is computed, look-ups, or both, of which each sample verifies one.

A look-up is a proposal that costs next to nothing. Look-ups alone go by what their verification costs (`look_ups`); a
computing drafter alone goes by `goodput`, asked as often as `cadence` says. Where both propose, the computing
drafter's law plans, and every sample's look-up is weighed against what it promises:

    worth of a draft     sum over its nodes of max(p - g * node_s, 0)
    a sample's choice    the look-up where its worth  >  LEAD * the draft's
    nothing is computed  where what all others would miss  <=  g * draft_s * share of samples that choose look-ups

with g what a second yields at best, look-ups included, and the draft's worth, before it is computed, that of the plan.
Where that law decodes plainly (drafting does not pay, or the drafter is suspended), look-ups go on alone. Estimates of
the computing drafter are corrected by its own samples alone. Looking up is free to a two-hundredth of the time; what
it takes beyond must be gained, or it pauses (`trials`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ...core.decode_records import PLAIN, Budget, DecodeState, DraftLog, StepRecord
from ...profiles.profile import Profile
from .cadence import Cadence
from .draft_policy import DrafterAlarm, DraftLaw, Proposal
from .goodput import GoodputPolicy
from .look_ups import MOST_GAIN, LookUps
from .trials import MEMORY_STEPS, Trials

LEAD = 1.5
"""A look-up must promise so many times as much. Where it is right a computed draft often is, too: to take the easy
samples from the drafter would leave it the hard ones, and make it look worse than it is."""
FREE_SHARE = 0.005
"Of a decode step, that looking up may take without having gained anything."


class AdaptiveDrafting(DraftLaw):
    """What `speculation.policy: goodput` makes. Pure: records and scores in, decisions out."""

    def __init__(
        self,
        profile: Profile,
        *,
        max_nodes: int,
        max_depth: int,
        computes: bool = True,
        looks_up: bool = False,
    ) -> None:
        """Make the law.

        Args:
            profile: of the target, and of the drafter that computes, on this machine.
            max_nodes: most draft nodes verified per sample.
            max_depth: most levels drafted, or tokens looked up.
            computes: a drafter computes.
            looks_up: look-ups stand beside it, or alone.
        """
        limits = {"max_nodes": max_nodes, "max_depth": max_depth}
        self.max_nodes, self._max_depth = max_nodes, max_depth
        self._computed = Cadence(GoodputPolicy(profile, **limits)) if computes else None
        self._look_ups = LookUps(profile, **limits) if looks_up else None
        self._trials = Trials()
        self._gain = 1.0
        "tokens a second over those planned, of late: look-ups make a second worth more"
        self._plain: Budget | None = None
        "what the computing drafter's law has planned, where that is plain decoding"
        self._is_beside = False
        "the last plan has room for look-ups beside what is computed, or in its place"

    def plan(self, state: DecodeState) -> Budget:
        """Return the computing drafter's budget with room for look-ups, or one for look-ups alone, or a plain one."""
        budget = PLAIN if self._computed is None else self._computed.plan(state)
        self._plain = budget if budget.is_plain else None
        self._is_beside = False
        if self._look_ups is None:
            return budget
        if budget.is_plain:
            alone = self._look_ups.plan(state)
            if self._computed is None:
                return alone
            count = alone.depth
            budget = budget if alone.is_plain else alone
        else:
            count = min(self._max_depth, self.max_nodes, state.max_remaining_tokens - 1)
            if self.law.is_probing or self._trials.is_paused(state.decode_step):
                count = 0
        self._is_beside = count > 0
        return _with_look_up(budget, count) if self._is_beside else budget

    def is_enough(self, look_up: Proposal) -> bool:
        """See `DraftLaw`."""
        if self._plain is not None:
            return True
        if not self._is_beside or not look_up.scores.shape[1]:
            return False
        node = self._node_tokens
        look_ups, wanted = _worth(look_up.scores, node), LEAD * self._draft_worth(node)
        # the few samples that are left may not be worth a draft for all of them
        missing = np.maximum(wanted - look_ups, 0.0).sum()
        return bool(missing <= self._draft_tokens * (look_ups > wanted).mean() and look_ups.any())

    def deepen(self, level: int, scores: np.ndarray) -> int:
        """As the computing drafter's law says."""
        return self._cadence.deepen(level, scores)

    def choose(self, proposals: Sequence[Proposal]) -> list[np.ndarray]:
        """See `DraftLaw`: the look-up is the first where there is room for one."""
        first, *computed = proposals
        if self._plain is not None:
            assert self._look_ups is not None, "what is to be plain is looked up"
            return [
                self._look_ups.select(first.scores),
                *(np.zeros(len(one.scores), int) for one in computed),
            ]
        if not self._is_beside:
            return [self._cadence.select(first.scores, first.level_sizes)]
        used, counts = self._select_either(first.scores, computed[0] if computed else None)
        return [np.where(used, counts, 0), np.where(used, 0, counts)][: len(proposals)]

    def _select_either(
        self, looked_up: np.ndarray, computed: Proposal | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return which samples verify what was looked up, [B, L] of path scores, and how many nodes of each."""
        batch = len(looked_up)
        ranked = np.zeros((batch, 0), dtype=np.float32)
        if computed is not None:
            ranked = self.law.ranked(computed.scores, computed.level_sizes)
        node = self._node_tokens
        used = _worth(looked_up, node) > LEAD * _worth(ranked, node)
        if not used.any():
            counts = self._cadence.choose(ranked) if ranked.shape[1] else np.zeros(batch, dtype=np.int64)
            return used, counts
        width = min(max(ranked.shape[1], looked_up.shape[1]), self.max_nodes)
        scores = np.where(used[:, None], _widened(looked_up, width), _widened(ranked, width))
        counts, _ = self.law.search(scores)
        # equal counts are cheaper to verify, but nothing stands behind a chain's end
        return used, np.minimum(counts, np.count_nonzero(scores > 0.0, axis=1))

    def observe(self, record: StepRecord) -> None:
        """Correct what each proposal's estimates are of; a step that was to be plain counts for look-ups."""
        if self._look_ups is not None and self._plain is not None:
            self._look_ups.observe(record)
            if self._computed is None:
                return
            if record.num_draft_tokens:
                # the draft cache lacks what was emitted
                self.law.probes.decoded_plainly(record)
            else:
                self._computed.observe(replace(record, budget=self._plain, draft=None))
            return
        draft = record.draft
        if draft is None or draft.look_up is None:
            self._cadence.observe(record)
            return
        self._judge(record, draft)
        own = ~draft.look_up.used
        if draft.level_sizes and own.any():
            # what looking up took is no cost of the computing drafter
            draft_s = max(record.draft_s - draft.look_up.seconds, 0.0)
            self._cadence.observe(replace(record, draft=_of_samples(draft, own), draft_s=draft_s))

    def take_alarm(self) -> DrafterAlarm | None:
        """See `DraftLaw`."""
        return None if self._computed is None else self.law.take_alarm()

    def _judge(self, record: StepRecord, draft: DraftLog) -> None:
        """Compare what look-ups brought with what the plan promised in their place."""
        look_up, saved_s = draft.look_up, 0.0
        assert look_up is not None, "something was looked up"
        if look_up.used.any() or not draft.level_sizes:
            node = self._node_tokens
            tokens = float(draft.num_accepted[look_up.used].sum()) - node * float(draft.num_nodes.sum())
            instead = self._draft_worth(node) * record.num_samples
            if draft.level_sizes:
                tokens += node * float(draft.num_nodes[~look_up.used].sum())
                instead *= float(look_up.used.mean())
            else:
                instead -= self._draft_tokens
            saved_s = (tokens - instead) / self._rate
        spent_s = max(look_up.seconds - FREE_SHARE * record.step_s, 0.0)
        gained = record.num_emitted_tokens / max(record.step_s * self.law.chosen.choice.goodput, 1e-9)
        self._gain += (min(gained, MOST_GAIN) - self._gain) / MEMORY_STEPS
        # one that fails is no verdict yet
        self._trials.tried(record.decode_step, saved_s=saved_s, spent_s=spent_s, credit_s=record.step_s)

    @property
    def law(self) -> GoodputPolicy:
        """Of the computing drafter."""
        return self._cadence.law

    @property
    def _cadence(self) -> Cadence:
        assert self._computed is not None, "a drafter computes"
        return self._computed

    @property
    def _rate(self) -> float:
        """Tokens that a second is worth."""
        return self.law.chosen.choice.goodput * max(self._gain, 1.0)

    @property
    def _node_tokens(self) -> float:
        """What the seconds to verify one node are worth."""
        chosen = self.law.chosen
        count, view = max(chosen.choice.num_nodes, 1), chosen.view
        seconds = float(view.uniform_s[count] - view.uniform_s[0]) / (count * view.num_samples)
        return self._rate * seconds

    @property
    def _draft_tokens(self) -> float:
        """What the seconds to draft as planned are worth."""
        chosen = self.law.chosen
        return self._rate * float(chosen.view.draft_s[chosen.choice.levels])

    def _draft_worth(self, node: float) -> float:
        """Of one sample's draft as planned, drafting left out."""
        choice = self.law.chosen.choice
        return max(choice.tokens - 1.0 - node * choice.num_nodes, 0.0)


def _worth(scores: np.ndarray, node: float) -> np.ndarray:
    """Expected tokens of the nodes that are worth their verification, less what that takes, [B]."""
    return np.maximum(scores - node, 0.0).sum(axis=1)


def _widened(scores: np.ndarray, width: int) -> np.ndarray:
    """The first columns, zeros behind them."""
    kept = scores[:, :width]
    return np.pad(kept, ((0, 0), (0, width - kept.shape[1])))


def _of_samples(draft: DraftLog, samples: np.ndarray) -> DraftLog:
    return DraftLog(
        scores=draft.scores[samples],
        level_sizes=draft.level_sizes,
        num_nodes=draft.num_nodes[samples],
        num_accepted=draft.num_accepted[samples],
    )


@lru_cache
def _with_look_up(budget: Budget, count: int) -> Budget:
    return replace(budget, look_up=count)
