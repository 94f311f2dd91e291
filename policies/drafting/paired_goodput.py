"""The law of gain over cost where a drafter that looks up stands beside one that computes.

The law of the computing drafter (`goodput`) plans. Where it drafts, every sample's look-up is weighed against it:

    worth of a draft     sum over its nodes of max(p - g * node_s, 0)
    a sample's choice    the look-up where its worth  >  LEAD * the draft's
    nothing is computed  where what all others would miss  <=  g * draft_s * share of samples that choose look-ups

with g what a second yields at best, look-ups included, and the draft's worth, before it is computed, that of the plan.
Where the law decodes plainly (drafting does not pay, or
the drafter is suspended), look-ups go by their own law (`lookup_goodput`). Estimates of the computing drafter are
corrected by its own samples alone. Looking up is free to a two-hundredth of the time; what it takes beyond must be
gained, or it pauses (`trials`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from rlhfspec.core.decode_records import Budget, DecodeState, DraftLog, StepRecord
from rlhfspec.policies.drafting.cadence import Cadence
from rlhfspec.policies.drafting.draft_policy import DrafterAlarm
from rlhfspec.policies.drafting.goodput import GoodputPolicy
from rlhfspec.policies.drafting.lookup_goodput import MOST_GAIN, LookupGoodput
from rlhfspec.policies.drafting.trials import MEMORY_STEPS, Trials
from rlhfspec.profiles.profile import Profile

LEAD = 1.5
"""A look-up must promise so many times as much. Where it is right a computed draft often is, too: to take the easy
samples from the drafter would leave it the hard ones, and make it look worse than it is."""
FREE_SHARE = 0.005
"Of a decode step, that looking up may take without having gained anything."


class PairedGoodput:
    """Pure: records and scores in, decisions out. It is a `PairedPolicy`."""

    def __init__(self, profile: Profile, *, max_nodes: int, max_depth: int) -> None:
        """Arguments as of `GoodputPolicy`; the profile is of the computing drafter."""
        self.max_nodes = max_nodes
        self._max_depth = max_depth
        self.law = GoodputPolicy(profile, max_nodes=max_nodes, max_depth=max_depth)
        "of the computing drafter"
        self._computed = Cadence(self.law)
        self._looked_up = LookupGoodput(profile, max_nodes=max_nodes, max_depth=max_depth)
        self._trials = Trials()
        self._gain = 1.0
        "tokens a second over those planned, of late: look-ups make a second worth more"
        self._plain: Budget | None = None
        "what the computing drafter's law has planned, where that is plain decoding"

    def plan(self, state: DecodeState) -> Budget:
        """Return the computing drafter's budget with room for look-ups, or one for look-ups alone, or a plain one."""
        budget = self._computed.plan(state)
        self._plain = budget if budget.is_plain else None
        if budget.is_plain:
            alone = self._looked_up.plan(state)
            return budget if alone.is_plain else _with_look_up(alone, alone.depth)
        count = min(self._max_depth, self.max_nodes, state.max_remaining_tokens - 1)
        if self.law.is_probing or count < 1 or self._trials.is_paused(state.decode_step):
            return budget
        return _with_look_up(budget, count)

    def looks_up_alone(self, looked_up: np.ndarray) -> bool:
        """See `PairedPolicy`."""
        if self._plain is not None:
            return True
        if not looked_up.shape[1]:
            return False
        node = self._node_tokens
        look_ups, wanted = _worth(looked_up, node), LEAD * self._draft_worth(node)
        # the few samples that are left may not be worth a draft for all of them
        missing = np.maximum(wanted - look_ups, 0.0).sum()
        return bool(missing <= self._draft_tokens * (look_ups > wanted).mean() and look_ups.any())

    def deepen(self, level: int, scores: np.ndarray) -> int:
        """As the computing drafter's law says."""
        return self._computed.deepen(level, scores)

    def select(self, scores: np.ndarray, level_sizes: tuple[int, ...]) -> np.ndarray:
        """As the computing drafter's law says: nothing was to be looked up."""
        return self._computed.select(scores, level_sizes)

    def select_either(
        self, computed: np.ndarray, level_sizes: tuple[int, ...], looked_up: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `PairedPolicy`."""
        if self._plain is not None:
            counts = self._looked_up.select(looked_up, (1,) * looked_up.shape[1])
            return counts > 0, counts
        batch = len(looked_up)
        ranked = np.zeros((batch, 0), dtype=np.float32)
        if level_sizes:
            ranked = self.law.ranked(computed, level_sizes)
        node = self._node_tokens
        used = _worth(looked_up, node) > LEAD * _worth(ranked, node)
        if not used.any():
            counts = self._computed.choose(ranked) if ranked.shape[1] else np.zeros(batch, dtype=np.int64)
            return used, counts
        width = min(max(ranked.shape[1], looked_up.shape[1]), self.max_nodes)
        scores = np.where(used[:, None], _widened(looked_up, width), _widened(ranked, width))
        counts, _ = self.law.search(scores)
        # equal counts are cheaper to verify, but nothing stands behind a chain's end
        counts = np.minimum(counts, np.count_nonzero(scores > 0.0, axis=1))
        return used & (counts > 0), counts

    def observe(self, record: StepRecord) -> None:
        """Tell each law what is of it."""
        if self._plain is not None:
            self._observe_plain(record, self._plain)
            return
        draft = record.draft
        if draft is None or draft.look_up is None:
            self._computed.observe(record)
            return
        self._judge(record, draft)
        own = ~draft.look_up.used
        if draft.level_sizes and own.any():
            # what looking up took is no cost of the computing drafter
            draft_s = max(record.draft_s - draft.look_up.seconds, 0.0)
            self._computed.observe(replace(record, draft=_of_samples(draft, own), draft_s=draft_s))

    def take_alarm(self) -> DrafterAlarm | None:
        """Return the alarm that has been raised since the last call, once."""
        return self._computed.take_alarm()

    def _observe_plain(self, record: StepRecord, plain: Budget) -> None:
        """A step that was to be plain, but for look-ups."""
        self._looked_up.observe(record)
        if record.num_draft_tokens:
            # the draft cache lacks what was emitted
            self.law.probes.decoded_plainly(record)
        else:
            self._computed.observe(replace(record, budget=plain, draft=None))

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
