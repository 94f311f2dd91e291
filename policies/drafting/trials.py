"""Whether something pays of late: what it saved and took; while that is a loss it pauses, longer and longer.

A few steps try again after a pause: what never helps costs a hundredth of the time or less.
"""

from __future__ import annotations

import numpy as np

MEMORY_STEPS = 64.0
"Decode steps after which what was gained counts for a third."
TRIAL_STEPS = 8
"Steps that a trial takes after a pause."
FIRST_PAUSE_STEPS, LONGEST_PAUSE_STEPS = 32, 2048
TRUST_STEPS = 16
"Steps before the first verdict: estimates of acceptance begin with a guess."


class Trials:
    """Seconds saved and spent; both fade."""

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
