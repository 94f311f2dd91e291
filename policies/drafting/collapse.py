"""Notices a drafter that has stopped being accepted (stale, dead, broken), by a sequential test.

Page's CUSUM on the first level: healthy means two thirds of the usual acceptance, collapsed a tenth of it, so that the
evidence turns at about three tenths. A drafter that is worse than usual, but no worse than that, is left to the
policy's own arithmetic. Each first node adds its log-likelihood ratio; the sum never falls below zero; past the
threshold drafting is suspended. Probes go on: when they are accepted as a healthy drafter's are, drafting resumes. The
usual acceptance follows slowly, so that a policy that moves away is not taken for a broken drafter. One sample alone
may be an odd one: it can suspend, but the alarm then waits for the next probe to say the same.
"""

from __future__ import annotations

import math

from ...core.decode_records import DraftLog
from .draft_policy import DrafterAlarm

HEALTHY_SHARE = 0.65
COLLAPSED_SHARE = 0.1
THRESHOLD = 5.0
"Log-likelihood ratio: about e^-5 false alarms for a drafter at the lower edge of healthy."
NEARLY = 0.5
"Of the threshold: where the evidence is called doubtful."
MOST_PER_STEP = 4.0
"One decode step's evidence counts no more: its samples share a cause."
FOLLOW = 0.002
LOWEST_USUAL = 0.3
"Below this there is nothing to collapse from: the policy's own arithmetic stops drafting."


class CollapseDetector:
    """CUSUM over first nodes, in both directions."""

    def __init__(self, *, healthy: float) -> None:
        self.suspended = False
        self.why = ""
        self._usual = healthy
        self._evidence = 0.0
        self._recent = healthy
        self._since = 0
        self._alarm: DrafterAlarm | None = None
        self._unconfirmed: DrafterAlarm | None = None
        self._most_samples = 0
        "in a step of the present evidence"

    def observe(self, decode_step: int, draft: DraftLog) -> None:
        """Take the first nodes' outcomes; what was not verified counts as its estimate says."""
        if self._usual < LOWEST_USUAL:
            return
        # numbers: of arrays so short every operation costs more than all of their values
        counts, trials = draft.num_nodes.tolist(), len(draft.num_nodes)
        successes = float(trials - draft.num_accepted.tolist().count(0))
        if 0 in counts:
            first = draft.scores[:, : draft.level_sizes[0]]
            guesses = (first[:, 0] if first.shape[1] == 1 else first.max(axis=1)).tolist()
            successes += sum(
                guess for count, guess in zip(counts, guesses, strict=True) if count == 0 and guess <= 1.0
            )
        good, bad = HEALTHY_SHARE * self._usual, COLLAPSED_SHARE * self._usual
        ratio = successes * math.log(bad / good) + (trials - successes) * math.log((1 - bad) / (1 - good))
        ratio = min(max(ratio, -MOST_PER_STEP), MOST_PER_STEP)
        self._recent += 0.2 * (successes / trials - self._recent)
        if self.suspended:
            if ratio > 0.0 and self._unconfirmed is not None:
                self._alarm, self._unconfirmed = self._unconfirmed, None
            # the same test the other way round: enough evidence of health resumes drafting
            self._evidence = min(self._evidence + ratio, THRESHOLD)
            if self._evidence <= 0.0:
                self._resume()
            return
        self._evidence = max(self._evidence + ratio, 0.0)
        self._most_samples = max(self._most_samples, trials) if self._evidence > 0.0 else 0
        self._usual += FOLLOW * (successes / trials - self._usual)
        if self._evidence >= THRESHOLD:
            self.suspended = True
            self._evidence = THRESHOLD
            self.why = f"first nodes accepted {self._recent:.2f} of late, usually {self._usual:.2f}"
            alarm = DrafterAlarm(
                decode_step=decode_step,
                drafter_age_steps=decode_step - self._since,
                observed=self._recent,
                usual=self._usual,
            )
            if self._most_samples > 1:
                self._alarm = alarm
            else:
                self._unconfirmed = alarm

    @property
    def doubtful(self) -> bool:
        """Another probe at once may decide: suspended, but the last one spoke for the drafter; or nearly suspended."""
        return self._evidence < THRESHOLD if self.suspended else self._evidence > NEARLY * THRESHOLD

    def new_drafter(self, decode_step: int) -> None:
        """New drafter weights get a fresh trial."""
        self._resume()
        self._evidence = 0.0
        self._since = decode_step

    def _resume(self) -> None:
        """Draft again: what was said against the drafter counts no more."""
        self.suspended, self.why = False, ""
        self._unconfirmed, self._most_samples = None, 0

    def take_alarm(self) -> DrafterAlarm | None:
        """Return the alarm, once."""
        alarm, self._alarm = self._alarm, None
        return alarm
