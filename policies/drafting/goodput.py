"""The goodput policy (design 3.2; RLHFSpec, arXiv 2512.04752, section 4): drafting weighed against measured time.

    plan     which shape, or none: the most expected tokens over predicted seconds, from the profile and this run
    deepen   another level, if an optimistic bound on what it adds is worth its seconds
    select   the nodes whose estimated acceptance is worth verifying, over the whole batch

Plain decoding is always a candidate. Where it wins, drafting is tried again now and then, at a two-hundredth of the
time. A drafter that stops being accepted is suspended (`policies.drafting.collapse`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from core.records import PLAIN, Budget, DecodeState, StepRecord
from policies.drafting.collapse import CollapseDetector
from policies.drafting.cost_view import BatchCosts, CostView
from policies.drafting.draft_policy import DrafterAlarm
from policies.drafting.node_search import Allocation, allocation_of, best_ragged, best_uniform, sorted_scores
from policies.drafting.recalibration import AcceptanceRecalibration, CostRecalibration
from policies.drafting.shapes import Choice, ShapeTable
from policies.drafting.track_record import TrackRecord
from profiles.cost import Shape
from profiles.profile import Profile

CONTEXT_STEP = 128
"Costs are looked up again when the mean context has grown by about so many tokens."
CHOOSE_STEPS = 16
"All shapes are compared after so many decode steps; chain, plain and the present shape when the batch changes too."
PLAIN_PATIENCE = 4
"Times as long where plain decoding is the choice."
QUIET_STEPS = 4
"Of so many plain decode steps, or steps of a large batch, one asks and teaches; the others go on as it did."
OBSERVE_COST_STEPS, OBSERVE_PLAIN_COST_STEPS = 16, 64
"Costs are compared with their prediction every so many decode steps, plain ones more seldom."
BLIND_RISK = 0.5
"Rejections per sample risked before scores are looked at again."
MAX_BLIND_LEVELS = 16
STEADY_BATCH = 4
"From so many samples on the depth of a draft varies little: half the way there goes without a question .."
LARGE_BATCH = 16
".. and from so many on all of it."
SMALL_BATCH_OBSERVED = 2
"Fewer samples teach with every decode step, and of acceptance with every so many."
COSTED_BITS, PLAIN_COSTED_BITS = 3, 2
"Costs are those of the next number of samples with so many leading bits: of 17 samples those of 20, or 24."
SEARCH_STEPS, LARGE_BATCH_SEARCH_STEPS = 4, 8
"The price of a node that a search has found serves so many decode steps."
MOST_COSTS = 256
"Batches and widths whose costs are kept."
PROBE_SHARE = 0.005
"Of the time spent in plain decoding, what trying the drafter may cost."
PROBE_DEPTH = 2
OTHER_BATCH = 2
"A batch so many times as large as the one that was drafted last is another one."


class GoodputPolicy:
    """Adaptive drafting from a profile, corrected online. Pure: records and scores in, decisions out."""

    def __init__(self, profile: Profile, *, max_nodes: int, max_depth: int) -> None:
        """Make the policy.

        Args:
            profile: of the pair on this machine.
            max_nodes: most draft nodes verified per sample.
            max_depth: most levels drafted.
        """
        self.max_nodes = max_nodes
        self._profile = profile
        self._max_depth = max_depth
        chain = np.diff(profile.yields[0].curve)[:max_depth]
        self._acceptance, self._untaught = AcceptanceRecalibration(chain), AcceptanceRecalibration(chain)
        self._costs = CostRecalibration()
        self._record = TrackRecord()
        self._collapse = CollapseDetector(healthy=float(chain[0]))
        self._shapes = ShapeTable(profile.yields, max_depth)
        self._batch_costs: dict[tuple[int, int], BatchCosts] = {}
        self._chosen_for: tuple[int, ...] = ()
        self._choice = Choice(branching=1, width=1, levels=0, num_nodes=0, goodput=0.0)
        self._view: CostView | None = None
        "costs of the choice"
        self._chain_view: CostView | None = None
        # what one more token costs in a large draft forward: the level's token terms with every hinge passed
        self._token_s = sum(profile.cost.draft[5:10])
        self._onward = self._acceptance.conditional
        "acceptance of a level given the one before"
        self._allocation = Allocation(price=0.0)
        self._searched = -LARGE_BATCH_SEARCH_STEPS
        "decode step of the last search"
        self._step = 0
        self._versions = (0, 0)
        self._plain_s = 0.0
        self._missing_tokens = 0.0
        self._probe_s = 0.0
        "what a probe costs by the present view, but for the tokens that the draft cache lacks"
        self._probing = False
        self._plain_for: tuple[str | None, int] | None = None
        self._plain_budget = PLAIN
        self._rests_on, self._rests_with = PLAIN, 0
        "what is done unasked, and with how many samples; 0 when every decode step asks"
        self._planned_for: tuple[Choice, int, int] | None = None
        self._planned = PLAIN
        self._judged_batch = 0
        "samples of the last draft; of a suspended drafter the most that have spoken against it"
        self._is_other_batch = False
        "the batch has grown out of what was learnt, and has not been drafted yet"
        self._models_say = 0.0
        "tokens per second of the choice before its track record"

    def plan(self, state: DecodeState) -> Budget:
        """Return a refined budget of the best shape, or plain decoding."""
        self._step = state.decode_step
        rests_on = self._rests_on
        if (
            state.num_samples == self._rests_with
            and state.decode_step % QUIET_STEPS
            and state.max_remaining_tokens > rests_on.depth
        ):
            return rests_on
        self._rests_with = 0
        self._follow_versions(state)
        self._follow_batch(state.num_samples)
        choice = self._choose(state)
        room = min(self._max_depth, state.max_remaining_tokens - 1)
        if room < 1:
            return PLAIN
        suspended = self._collapse.suspended
        self._probing = suspended or choice.num_nodes == 0
        if self._probing:
            if not self._probe_is_due(suspended, state.num_samples):
                return self._rest(state.num_samples, self._plain(suspended, state.num_samples))
            depth = min(PROBE_DEPTH, room, self.max_nodes)
            return _budget(1, 1, depth, self.max_nodes, "probe of the drafter")
        depth = choice.levels
        if choice.branching == 1 and state.num_samples < LARGE_BATCH:
            # a chain stops itself; the plan only bounds it, by what can be verified and cached
            depth = min(max(4, 2 * depth), self.max_nodes)
        depth = min(room, depth)
        situation = (choice, state.num_samples, depth)
        if situation != self._planned_for:
            self._planned_for = situation
            reason = (
                f"B={state.num_samples}: shape {choice.branching}x{choice.width}, about {choice.num_nodes} nodes, "
                f"{choice.goodput:.0f} tokens/s expected"
            )
            self._planned = _budget(choice.branching, choice.width, depth, self.max_nodes, reason)
        return (
            self._rest(state.num_samples, self._planned)
            if state.num_samples >= LARGE_BATCH
            else self._planned
        )

    def deepen(self, level: int, scores: np.ndarray) -> int:
        """Compare a bound on the next level's worth with its seconds; ask seldom where a stop is unlikely."""
        if self._probing:
            return PROBE_DEPTH - level
        levels = self._levels_unasked(level)
        if level == 0 or self._view is None:
            return levels
        if scores.shape[1] > self._choice.width:
            scores = -np.sort(-scores, axis=1)[:, : self._choice.width]
        onward, view, rate = _at(self._onward, level), self._view, self._choice.goodput
        node_cost = rate * _step_at(view.uniform_s, level) / view.num_samples
        # numbers: of arrays so short every operation costs more than all of their values
        hazard = self._acceptance.hazard_ratio
        gain = sum(max(score**hazard * onward - node_cost, 0.0) for score in scores.ravel().tolist())
        return 0 if gain <= rate * _step_at(view.draft_s, level) else levels

    def select(self, scores: np.ndarray, level_sizes: tuple[int, ...]) -> np.ndarray:
        """Return each sample's number of nodes."""
        batch = len(scores)
        if self._probing or self._view is None:
            return np.full(batch, min(scores.shape[1], self.max_nodes), dtype=np.int64)
        ordered = self._acceptance.corrected(sorted_scores(scores, level_sizes)[:, : self.max_nodes])
        if self._step < self._searched + (SEARCH_STEPS if batch < LARGE_BATCH else LARGE_BATCH_SEARCH_STEPS):
            return self._allocation.of(ordered)
        self._searched, rate = self._step, self._choice.goodput
        count, worth = best_uniform(ordered, self._view, rate)
        counts = np.full(batch, count, dtype=np.int64)
        if batch == 1:
            self._allocation = Allocation(price=rate * _step_at(self._view.uniform_s, count))
            return counts
        ragged_counts, ragged_worth = best_ragged(ordered, self._view, rate)
        if ragged_worth > worth:
            counts = ragged_counts
        self._allocation = allocation_of(counts, ordered)
        return counts

    def observe(self, record: StepRecord) -> None:
        """Correct acceptance and costs by what the decode step did."""
        draft, taught = record.draft, 1
        if draft is None:
            self._plain_s += record.step_s
            self._missing_tokens += record.num_emitted_tokens
            if record.decode_step % QUIET_STEPS:
                return
            taught = QUIET_STEPS
        else:
            is_large = record.num_samples >= LARGE_BATCH
            if is_large and not self._probing:
                if record.decode_step % QUIET_STEPS:
                    return
                taught = QUIET_STEPS
            if is_large or self._probing or record.decode_step % SMALL_BATCH_OBSERVED == 0:
                self._acceptance.observe(draft)
            suspended = self._collapse.suspended
            self._collapse.observe(record.decode_step, draft)
            if self._collapse.suspended:
                self._rests_with = 0
            elif suspended:
                # what the dead drafter taught says nothing of the living one
                self._acceptance.widen()
            against = self._judged_batch if suspended and self._collapse.suspended else 0
            self._judged_batch, self._is_other_batch = max(against, record.num_samples), False
            self._plain_s = self._missing_tokens = 0.0
        # a probe is no step of the choice, and a sample's last tokens fall short of what a draft yields
        is_choice = record.budget.branching == self._kind and (draft is None or not self._probing)
        if is_choice and record.state.max_remaining_tokens > self._choice.num_nodes:
            step = self._choice.tokens * record.num_samples
            self._record.observe(
                self._kind,
                self._chosen_for[0],
                delivered=record.num_emitted_tokens / step,
                expected=self._models_say * record.step_s / step,
                num_steps=taught,
            )
        if record.decode_step % (OBSERVE_COST_STEPS if draft else OBSERVE_PLAIN_COST_STEPS) == 0:
            self._observe_costs(record)

    @property
    def _kind(self) -> int:
        """Branching of the chosen shape, 0 for plain decoding."""
        return self._choice.branching if self._choice.num_nodes else 0

    def take_alarm(self) -> DrafterAlarm | None:
        """Return the alarm that has been raised since the last call, once."""
        return self._collapse.take_alarm()

    def _choose(self, state: DecodeState) -> Choice:
        """Return the shape of the highest goodput; looked for only when something has moved."""
        drafts = self._choice.num_nodes > 0
        batch = _costed(state.num_samples, COSTED_BITS if drafts else PLAIN_COSTED_BITS)
        grown = state.context_tokens // (state.num_samples * CONTEXT_STEP)
        patience = CHOOSE_STEPS if drafts else PLAIN_PATIENCE * CHOOSE_STEPS
        period = (state.decode_step // patience, *self._versions)
        if self._chosen_for == (batch, grown, *period):
            return self._choice
        # between periods a batch that shrinks keeps its shape: only its own costs are looked up
        all_shapes = period != self._chosen_for[2:]
        self._chosen_for = (batch, grown, *period)
        context_tokens = batch * state.context_tokens // state.num_samples
        views = {
            width: self._costs_of(batch, width).at(
                context_tokens, draft=self._costs.draft, verify=self._costs.verify
            )
            for width in (self._shapes.widths if all_shapes else {1, self._choice.width})
        }
        before, self._onward = self._choice, self._acceptance.conditional
        self._choice = self._shapes.best(views, np.cumprod(self._onward), self._record)
        self._models_say = self._choice.goodput / self._record.factor(self._kind, batch)
        self._view = views[self._choice.width]
        self._follow_probe_costs(views[1])
        if self._choice.width != before.width:
            self._searched = -LARGE_BATCH_SEARCH_STEPS
        return self._choice

    def _costs_of(self, batch: int, width: int) -> BatchCosts:
        key = (batch, width)
        if key not in self._batch_costs:
            if len(self._batch_costs) == MOST_COSTS:
                self._batch_costs.clear()
            self._batch_costs[key] = BatchCosts(
                self._profile.cost,
                num_samples=batch,
                width=width,
                max_nodes=self.max_nodes,
                max_levels=self._max_depth,
            )
        return self._batch_costs[key]

    def _levels_unasked(self, level: int) -> int:
        """How many levels are drafted from `level` on before scores are looked at again."""
        choice, levels = self._choice, 1
        if choice.branching == 1:
            risk = max(1.0 - _at(self._onward, level), 1e-3)
            levels = int(min(max(BLIND_RISK / risk, 1.0), MAX_BLIND_LEVELS))
        batch = self._chosen_for[0] if self._chosen_for else 1
        if batch >= STEADY_BATCH:
            ahead = choice.levels - level
            levels = max(levels, ahead if batch >= LARGE_BATCH else (ahead + 1) // 2)
        return levels

    def _rest(self, batch: int, budget: Budget) -> Budget:
        """Go on with a budget unasked, for a few decode steps of as many samples."""
        self._rests_on, self._rests_with = budget, batch
        return budget

    def _plain(self, suspended: bool, batch: int) -> Budget:
        """Return plain decoding and why; made once as long as both stay: a plain step is short."""
        situation = (self._collapse.why if suspended else None, batch)
        if situation != self._plain_for:
            self._plain_for = situation
            why = f"drafter suspended: {self._collapse.why}" if suspended else "drafting does not pay"
            self._plain_budget = replace(PLAIN, reason=f"{why}; B={batch}")
        return self._plain_budget

    def _probe_is_due(self, suspended: bool, batch: int) -> bool:
        """A probe costs a level, a wider verification and the tokens the draft cache lacks.

        One odd sample in the tail can look like a dead drafter: a larger batch is asked again without waiting. So is
        another batch of which the profile alone says that drafting pays.
        """
        if self._collapse.doubtful or (suspended and batch > self._judged_batch):
            return True
        view = self._chain_view
        if view is None:
            return False
        if self._is_other_batch:
            self._is_other_batch = False
            if self._shapes.best({1: view}, self._untaught.path, self._record).num_nodes:
                return True
        affordable_s = self._plain_s * (2 * PROBE_SHARE if suspended else PROBE_SHARE)
        if affordable_s < self._probe_s:
            return False
        # a draft cache lacks no more tokens than the batch has
        missing = min(self._missing_tokens, view.context_tokens)
        return affordable_s >= self._probe_s + missing * self._token_s * self._costs.draft

    def _follow_probe_costs(self, view: CostView) -> None:
        levels, nodes = (min(PROBE_DEPTH, len(table) - 1) for table in (view.draft_s, view.uniform_s))
        self._chain_view = view
        self._probe_s = float(view.draft_s[levels] + view.uniform_s[nodes] - view.uniform_s[0])

    def _follow_versions(self, state: DecodeState) -> None:
        versions = (state.weight_version, state.drafter_version)
        if versions == self._versions:
            return
        if versions[1] != self._versions[1]:
            self._collapse.new_drafter(state.decode_step)
        self._versions = versions
        self._acceptance.widen()

    def _follow_batch(self, batch: int) -> None:
        """What the last samples of a rollout taught says little of the next one's first batch."""
        if self._judged_batch == 0 or batch < OTHER_BATCH * self._judged_batch or self._collapse.suspended:
            return
        self._acceptance.widen(self._judged_batch / batch)
        self._judged_batch, self._is_other_batch = batch, True
        self._chosen_for = ()

    def _observe_costs(self, record: StepRecord) -> None:
        draft = record.draft
        shape = Shape(
            num_samples=float(record.num_samples),
            context_tokens=float(record.context_tokens),
            num_nodes=float(draft.num_nodes.sum()) if draft else 0.0,
            widest=float(draft.num_nodes.max()) if draft else 0.0,
            levels=float(len(draft.level_sizes)) if draft else 0.0,
            width=float(record.budget.width or 1),
        )
        cost = self._profile.cost
        draft_s = float(cost.draft_s(shape)) if draft else 0.0
        self._costs.observe(record, draft_s=draft_s, verify_s=float(cost.verify_s(shape)))


def _costed(batch: int, bits: int = COSTED_BITS) -> int:
    """The batch whose costs are looked up: at most a quarter larger, with two bits a half."""
    step = 1 << max(batch.bit_length() - bits, 0)
    return -(-batch // step) * step


def _at(values: np.ndarray, index: int) -> float:
    """A value by index; the last one goes on."""
    return float(values[min(index, len(values) - 1)])


def _step_at(values: np.ndarray, index: int) -> float:
    """From one value to the next; the last step goes on."""
    index = min(index, len(values) - 2)
    return float(values[index + 1] - values[index])


def _budget(branching: int, width: int, depth: int, max_nodes: int, reason: str) -> Budget:
    return Budget(
        num_nodes=max_nodes, depth=depth, branching=branching, width=width, reason=reason, refined=True
    )
