"""When to try what does not pay now: a drafter while decoding is plain, look-ups that have paused.

A probe of the drafter costs two levels, a wider verification and the tokens that the draft cache lacks. It is paid
from a two-hundredth of the time spent in plain decoding since the last draft. Look-ups cost next to nothing, and are
judged by what they saved and took: while that is a loss they pause, longer and longer, and a few steps try again.
What never helps costs a hundredth of the time or less.
"""

from __future__ import annotations

import numpy as np

from ...core.decode_records import StepRecord
from .estimators import Estimators
from .shape_search import Chosen, ShapeSearch

PROBE_SHARE = 0.005
"Of the time spent in plain decoding, what trying the drafter may cost; twice as much while it is suspended."
MEMORY_STEPS = 64.0
"Decode steps after which what was gained counts for a third."
TRIAL_STEPS = 8
"Steps that a trial takes after a pause."
FIRST_PAUSE_STEPS, LONGEST_PAUSE_STEPS = 32, 2048
TRUST_STEPS = 16
"Steps before the first verdict: estimates of acceptance begin with a guess."


class Probes:
    """Seconds of plain decoding, and what a probe of the drafter would cost."""

    def __init__(self, token_s: float) -> None:
        """`token_s`: what one token costs that the draft cache lacks."""
        self._token_s = token_s
        self._plain_s = 0.0
        self._missing_tokens = 0.0

    def drafted(self) -> bool:
        """The drafter has been tried: begin again; True where its cache had lacked tokens."""
        catches_up = self._missing_tokens > 0.0
        self._plain_s = self._missing_tokens = 0.0
        return catches_up

    def decoded_plainly(self, record: StepRecord) -> None:
        """Put a plain step's time aside."""
        self._plain_s += record.step_s
        self._missing_tokens += record.num_emitted_tokens

    def is_due(self, num_samples: int, chosen: Chosen, estimators: Estimators, search: ShapeSearch) -> bool:
        """True where the next step should be a probe.

        One odd sample in the tail can look like a dead drafter: a larger batch is asked again without waiting. So is
        another batch of which the profile alone says that drafting pays.
        """
        collapse = estimators.collapse
        if collapse.doubtful or (collapse.suspended and num_samples > estimators.judged_batch):
            return True
        if estimators.is_other_batch:
            estimators.is_other_batch = False
            if search.drafts_by_profile(chosen.chain_view, estimators.record):
                return True
        affordable_s = self._plain_s * (2 * PROBE_SHARE if collapse.suspended else PROBE_SHARE)
        probe_s = chosen.probe_s
        if affordable_s < probe_s:
            return False
        # a draft cache lacks no more tokens than the batch has
        missing = min(self._missing_tokens, chosen.chain_view.context_tokens)
        return affordable_s >= probe_s + missing * self._token_s * estimators.costs.draft


class Trials:
    """Seconds that look-ups saved and spent; both fade."""

    def __init__(self) -> None:
        self.pause_steps = 0
        "of the last pause, 0 where the last trial paid"
        self._saved_s = self._spent_s = 0.0
        self._num_tried = 0
        "steps since the last pause"
        self._until = 0
        "decode step at which the pause ends"

    def is_paused(self, decode_step: int) -> bool:
        """True where it is not to be tried in this step."""
        return decode_step < self._until

    def tried(self, decode_step: int, *, saved_s: float, spent_s: float, credit_s: float = 0.0) -> None:
        """Take a step's outcome; a pause may begin. Where there was none, so much may be lost before it does."""
        fade = np.exp(-1.0 / MEMORY_STEPS)
        self._saved_s = self._saved_s * fade + saved_s
        self._spent_s = self._spent_s * fade + spent_s
        self._num_tried += 1
        if self._num_tried < (TRIAL_STEPS if self.pause_steps else TRUST_STEPS):
            return
        if self._pays(0.0 if self.pause_steps else credit_s):
            self.pause_steps = 0
            return
        self.pause_steps = min(max(2 * self.pause_steps, FIRST_PAUSE_STEPS), LONGEST_PAUSE_STEPS)
        self._until = decode_step + 1 + self.pause_steps
        self._num_tried = 0
        # the next trial is judged by itself
        self._saved_s = self._spent_s = 0.0

    def _pays(self, credit_s: float) -> bool:
        """A loss within the credit is none; what was spent beside must be saved all the same."""
        saved_s = 0.0 if -credit_s <= self._saved_s < 0.0 else self._saved_s
        return saved_s >= self._spent_s
