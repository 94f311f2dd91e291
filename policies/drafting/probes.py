"""When the drafter is tried although plain decoding is the choice: at a two-hundredth of the time, or at once.

A probe costs two levels, a wider verification and the tokens that the draft cache lacks. It is paid from the time
spent in plain decoding since the last draft.
"""

from __future__ import annotations

from rlhfspec.core.decode_records import StepRecord
from rlhfspec.policies.drafting.estimators import Estimators
from rlhfspec.policies.drafting.planner import Chosen, Planner

PROBE_SHARE = 0.005
"Of the time spent in plain decoding, what trying the drafter may cost; twice as much while it is suspended."


class ProbeAccount:
    """Seconds of plain decoding, and what a probe would cost."""

    def __init__(self, token_s: float) -> None:
        """`token_s`: what one token costs that the draft cache lacks."""
        self._token_s = token_s
        self._plain_s = 0.0
        self._missing_tokens = 0.0

    def drafted(self) -> None:
        """The drafter has been tried: begin again."""
        self._plain_s = self._missing_tokens = 0.0

    def decoded_plainly(self, record: StepRecord) -> None:
        """Put a plain step's time aside."""
        self._plain_s += record.step_s
        self._missing_tokens += record.num_emitted_tokens

    def is_due(self, num_samples: int, chosen: Chosen, estimators: Estimators, planner: Planner) -> bool:
        """True where the next step should be a probe.

        One odd sample in the tail can look like a dead drafter: a larger batch is asked again without waiting. So is
        another batch of which the profile alone says that drafting pays.
        """
        collapse = estimators.collapse
        if collapse.doubtful or (collapse.suspended and num_samples > estimators.judged_batch):
            return True
        if estimators.is_other_batch:
            estimators.is_other_batch = False
            if planner.drafts_by_profile(chosen.chain_view, estimators.record):
                return True
        affordable_s = self._plain_s * (2 * PROBE_SHARE if collapse.suspended else PROBE_SHARE)
        probe_s = chosen.probe_s
        if affordable_s < probe_s:
            return False
        # a draft cache lacks no more tokens than the batch has
        missing = min(self._missing_tokens, chosen.chain_view.context_tokens)
        return affordable_s >= probe_s + missing * self._token_s * estimators.costs.draft
