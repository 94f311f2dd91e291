"""The control law of drafting: gain over cost (goodput; RLHFSpec, arXiv 2512.04752, section 4).

A decode step that verifies n draft nodes for each of B samples emits B (1 + A(n)) tokens in expectation: one that every
step emits, and those that are accepted. It takes the time to draft, to verify, and the rest. The law maximises

    g(shape, n) = B (1 + A(n)) / (draft_s(shape) + verify_s(n) + rest_s)               expected tokens over seconds

    plan      the shape and n of the largest g. n = 0 is plain decoding, with A = 0 and draft_s = 0: always a candidate
    deepen    one level more as long as      sum over its nodes of max(p - g * node_s, 0)  >  g * level_s
    select    the nodes that maximise        sum of p  -  g * (verify_s + rest_s)
    observe   correct A, the seconds, and what whole shapes deliver, by what the step did

where p estimates that a node and all before it are accepted, and node_s and level_s are what one more costs. So within
a step a second is worth g tokens, what the batch yields at its best: a step judged by its own quotient would stop a
bad draft too late and a good one too early (renewal-reward).

Two exceptions. A drafter that stops being accepted is suspended (`policies.drafting.collapse`). Where plain decoding is
the choice the drafter is tried now and then (`policies.drafting.trials`).

A and the seconds come from the profile, corrected by this run (`policies.drafting.estimators`); shapes are compared in
`policies.drafting.shape_search`, nodes in `policies.drafting.node_search`. The law itself decides everything anew at
every step; `policies.drafting.cadence` wraps it and decides how often it is asked.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ...core.decode_records import PLAIN, Budget, DecodeState, StepRecord
from ...profiles.profile import Profile
from .cost_view import step_at
from .draft_policy import DrafterAlarm
from .estimators import Estimators
from .node_search import Allocation, best_nodes, sorted_scores
from .shape_search import PROBE_DEPTH, ShapeSearch
from .trials import Probes

LARGE_BATCH = 16
"From so many samples on the depth that the whole batch wants hardly varies: chains are as deep as planned."


class GoodputPolicy:
    """Adaptive drafting from a profile, corrected online. Pure: records and scores in, decisions out.

    `plan` is `follow`, `choose` and `decide`; `select` is `ranked` and `search`.
    """

    def __init__(self, profile: Profile, *, max_nodes: int, max_depth: int) -> None:
        """Make the policy.

        Args:
            profile: of the pair on this machine.
            max_nodes: most draft nodes verified per sample.
            max_depth: most levels drafted.
        """
        self.max_nodes = max_nodes
        self._max_depth = max_depth
        self._estimators = Estimators(profile, max_depth)
        self._shapes = ShapeSearch(profile, max_nodes=max_nodes, max_depth=max_depth)
        # one more token in a large draft forward: the level's token terms with every hinge passed
        self.probes = Probes(token_s=sum(profile.cost.draft[5:10]))
        self.chosen = self._shapes.undrafted(self._estimators.acceptance)
        "the shape of the largest g"
        self.is_probing = False
        "the last plan tries a drafter that is not chosen"

    def plan(self, state: DecodeState) -> Budget:
        """Return a refined budget of the best shape, or plain decoding."""
        self.follow(state)
        self.choose(state.num_samples, state.context_tokens)
        return self.decide(state)

    def deepen(self, level: int, scores: np.ndarray) -> int:
        """Compare a bound on the next level's worth with its seconds; a first level is as planned."""
        if self.is_probing:
            return PROBE_DEPTH - level
        if level == 0:
            return 1
        chosen = self.chosen
        view, rate, width = chosen.view, chosen.choice.goodput, chosen.choice.width
        if scores.shape[1] > width:
            scores = -np.sort(-scores, axis=1)[:, :width]
        onward = float(chosen.onward[min(level, len(chosen.onward) - 1)])
        node_cost = rate * step_at(view.uniform_s, level) / view.num_samples
        # numbers: of arrays so short every operation costs more than all of their values
        hazard = self._estimators.acceptance.hazard_ratio
        gain = sum(max(score**hazard * onward - node_cost, 0.0) for score in scores.ravel().tolist())
        return 0 if gain <= rate * step_at(view.draft_s, level) else 1

    def select(self, scores: np.ndarray, level_sizes: tuple[int, ...]) -> np.ndarray:
        """Return each sample's number of nodes; a probe verifies all."""
        if self.is_probing:
            return np.full(len(scores), min(scores.shape[1], self.max_nodes), dtype=np.int64)
        return self.search(self.ranked(scores, level_sizes))[0]

    def observe(
        self,
        record: StepRecord,
        *,
        num_steps: int = 1,
        with_acceptance: bool = True,
        with_costs: bool = True,
    ) -> None:
        """Correct the estimates by what the decode step did.

        Args:
            record: of the step; its draft may be that of some samples alone.
            num_steps: that it stands for; of the others `probes` are told at most.
            with_acceptance: a draft's outcome corrects acceptance.
            with_costs: its seconds correct the costs.
        """
        estimators = self._estimators
        if record.draft is None:
            self.probes.decoded_plainly(record)
        else:
            estimators.observe_draft(record, with_acceptance=with_acceptance)
            if self.probes.drafted() or len(record.draft.num_nodes) < record.num_samples:
                # the next draft need not fill its cache; or samples without a draft were verified too
                return
        if record.draft is None or not self.is_probing:
            estimators.observe_choice(record, self.chosen, num_steps=num_steps)
        if with_costs:
            estimators.observe_costs(record)

    def take_alarm(self) -> DrafterAlarm | None:
        """Return the alarm that has been raised since the last call, once."""
        return self._estimators.collapse.take_alarm()

    # --- the parts of `plan`, `select` and `observe`

    def follow(self, state: DecodeState) -> bool:
        """Let the past count less where weights or samples are others; True where they are."""
        return self._estimators.follow(state)

    def choose(self, num_samples: int, context_tokens: int, *, all_shapes: bool = True) -> None:
        """Compare shapes: all of them, or those as wide as the present one or a chain."""
        estimators = self._estimators
        self.chosen = self._shapes.choose(
            num_samples,
            context_tokens,
            acceptance=estimators.acceptance,
            costs=estimators.costs,
            record=estimators.record,
            widths=self._shapes.widths if all_shapes else {1, self.chosen.choice.width},
        )

    def decide(self, state: DecodeState) -> Budget:
        """Return the budget of the shape chosen, or a probe."""
        self.is_probing = False
        room = min(self._max_depth, state.max_remaining_tokens - 1)
        if room < 1:
            return PLAIN
        choice, batch, collapse = self.chosen.choice, state.num_samples, self._estimators.collapse
        if collapse.suspended or choice.num_nodes == 0:
            if not self.probes.is_due(batch, self.chosen, self._estimators, self._shapes):
                return _plain(collapse.why if collapse.suspended else None, batch)
            self.is_probing = True
            return _probe(min(PROBE_DEPTH, room, self.max_nodes), self.max_nodes)
        depth = choice.levels
        if choice.branching == 1 and batch < LARGE_BATCH:
            # a chain stops itself; the plan only bounds it, by what can be verified and cached
            depth = min(max(4, 2 * depth), self.max_nodes)
        return _draft(
            choice.branching,
            choice.width,
            min(room, depth),
            self.max_nodes,
            batch,
            choice.num_nodes,
            choice.goodput,
        )

    def ranked(self, scores: np.ndarray, level_sizes: tuple[int, ...]) -> np.ndarray:
        """Each sample's scores in descending order, as this run accepts them: [B, max_nodes] at most."""
        ordered = sorted_scores(scores, level_sizes)[:, : self.max_nodes]
        return self._estimators.acceptance.corrected(ordered)

    def search(self, ranked: np.ndarray) -> tuple[np.ndarray, Allocation]:
        """Return each sample's number of nodes, and the rule that chose them."""
        return best_nodes(ranked, self.chosen.view, self.chosen.choice.goodput)

    @property
    def suspended(self) -> bool:
        """The drafter has stopped being accepted."""
        return self._estimators.collapse.suspended


@lru_cache
def _draft(
    branching: int, width: int, depth: int, max_nodes: int, batch: int, num_nodes: int, goodput: float
) -> Budget:
    reason = f"B={batch}: shape {branching}x{width}, about {num_nodes} nodes, {goodput:.0f} tokens/s expected"
    return _refined(branching, width, depth, max_nodes, reason)


@lru_cache
def _probe(depth: int, max_nodes: int) -> Budget:
    return _refined(1, 1, depth, max_nodes, "probe of the drafter")


@lru_cache
def _plain(suspended: str | None, batch: int) -> Budget:
    why = f"drafter suspended: {suspended}" if suspended is not None else "drafting does not pay"
    return Budget(num_nodes=0, depth=0, branching=0, width=0, reason=f"{why}; B={batch}")


def _refined(branching: int, width: int, depth: int, max_nodes: int, reason: str) -> Budget:
    return Budget(
        num_nodes=max_nodes, depth=depth, branching=branching, width=width, reason=reason, refined=True
    )
