"""What a run has taught beyond its profile: the estimates that the law's gain and cost are read from.

    acceptance   rejections over those that the scores expect (`recalibration`)
    costs        seconds of drafting and verification over those predicted (`recalibration`)
    record       tokens and seconds of a whole shape over those expected of it (`recalibration`)
    collapse     a sequential test for a drafter that has stopped being accepted (`collapse`)

New weights and another batch make the past of acceptance count less (`follow`): no seconds depend on weights.
"""

from __future__ import annotations

import numpy as np

from ...core.decode_records import DecodeState, StepRecord
from ...profiles.cost import Shape
from ...profiles.profile import Profile
from .collapse import CollapseDetector
from .recalibration import AcceptanceRecalibration, CostRecalibration, TrackRecord
from .shape_search import Chosen

OTHER_BATCH = 2
"A batch so many times as large as the one that was drafted last is another one."


class Estimators:
    """All four, and the batch that they were taught by."""

    def __init__(self, profile: Profile, max_depth: int) -> None:
        """Begin with what the profile says."""
        chain = np.diff(profile.yields[0].curve)[:max_depth]
        self.acceptance = AcceptanceRecalibration(chain)
        self.costs = CostRecalibration()
        self.record = TrackRecord()
        self.collapse = CollapseDetector(healthy=float(chain[0]))
        self.judged_batch = 0
        "samples of the last draft; of a suspended drafter the most that have spoken against it"
        self.is_other_batch = False
        "the batch has grown out of what was learnt, and has not been drafted yet"
        self._cost_model = profile.cost
        self._weight_version = self._drafter_version = 0

    def follow(self, state: DecodeState) -> bool:
        """Let what was accepted count less where weights or samples are others; True where they are."""
        is_new = False
        if state.weight_version != self._weight_version or state.drafter_version != self._drafter_version:
            if state.drafter_version != self._drafter_version:
                self.collapse.new_drafter(state.decode_step)
            self._weight_version, self._drafter_version = state.weight_version, state.drafter_version
            self.acceptance.widen()
            is_new = True
        # what the last samples of a rollout taught says little of the next one's first batch
        batch, judged = state.num_samples, self.judged_batch
        if judged and batch >= OTHER_BATCH * judged and not self.collapse.suspended:
            self.acceptance.widen(judged / batch)
            self.judged_batch, self.is_other_batch = batch, True
            is_new = True
        return is_new

    def observe_draft(self, record: StepRecord, *, with_acceptance: bool = True) -> None:
        """Take a draft's outcome: what was accepted, and whether the drafter is alive."""
        draft = record.draft
        assert draft is not None, "a draft"
        if with_acceptance:
            self.acceptance.observe(draft)
        was_suspended = self.collapse.suspended
        self.collapse.observe(record.decode_step, draft)
        suspended = self.collapse.suspended
        if was_suspended and not suspended:
            # what the dead drafter taught says nothing of the living one
            self.acceptance.widen()
        against = self.judged_batch if was_suspended and suspended else 0
        self.judged_batch, self.is_other_batch = max(against, record.num_samples), False

    def observe_choice(self, record: StepRecord, chosen: Chosen, *, num_steps: int = 1) -> None:
        """Compare a step of the chosen shape, which stands for `num_steps`, with what was expected of the shape."""
        choice, kind = chosen.choice, chosen.choice.kind
        # a sample's last tokens fall short of what a draft yields
        if record.budget.branching != kind or record.state.max_remaining_tokens <= choice.num_nodes:
            return
        step = choice.tokens * record.num_samples
        self.record.observe(
            kind,
            chosen.num_samples,
            tokens=record.num_emitted_tokens / step,
            seconds=chosen.models_say * record.step_s / step,
            num_steps=num_steps,
        )

    def observe_costs(self, record: StepRecord) -> None:
        """Compare the step's seconds with those of the cost model."""
        draft = record.draft
        shape = Shape(
            num_samples=float(record.num_samples),
            context_tokens=float(record.context_tokens),
            num_nodes=float(draft.num_nodes.sum()) if draft else 0.0,
            widest=float(draft.num_nodes.max()) if draft else 0.0,
            levels=float(len(draft.level_sizes)) if draft else 0.0,
            width=float(record.budget.width or 1),
        )
        draft_s = float(self._cost_model.draft_s(shape)) if draft else 0.0
        self.costs.observe(record, draft_s=draft_s, verify_s=float(self._cost_model.verify_s(shape)))
