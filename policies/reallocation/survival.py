"""How much longer a response is likely to get, given its length so far: the empirical survival curve of a run.

The hazard at length t is the chance that a response which reached t tokens ends there. It is estimated from finished
lengths and from open ones, which are known to be longer than they are (Kaplan and Meier 1958, "censored"), on top of
a prior that counts as a few samples (the beta process of Hjort 1990). The prior's tail is heavy: what remains is in
proportion to what there is, up to the limit. Lengths of the last iteration may be given: rollouts resemble them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PRIOR_SAMPLES = 1.0
"The prior counts as so many samples, at every length."
PRIOR_TAIL = 2.0
"Exponent of the prior's tail."
PRIOR_MEDIAN_SHARE = 1 / 8
"Median of a response's length before anything is known, as a share of the limit."
EARLIER_WEIGHT = 0.25
"A length of an earlier iteration counts as so many of this one's."
MEMORY_SAMPLES = 2048
"With so many lengths known, all count half from then on: the policy that makes them moves."


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """P(length > t) for t = 0 .. limit; it is 0 at the limit."""

    probability: np.ndarray
    "[limit + 1] float64, not increasing, 1 at t = 0"

    @property
    def limit(self) -> int:
        """No response is longer."""
        return len(self.probability) - 1

    def mean_remaining(self) -> np.ndarray:
        """Expected further tokens at every length so far, [limit + 1]."""
        beyond = _reversed_sum(self.probability)
        alive = self.probability
        return np.where(alive > 0, beyond / np.where(alive > 0, alive, 1.0), 0.0)


class LengthHistory:
    """Finished lengths of this run, and what the last iteration's say."""

    def __init__(self, *, earlier_lengths: Sequence[int] = (), prior_samples: float = PRIOR_SAMPLES) -> None:
        lengths = np.maximum(np.asarray(earlier_lengths, dtype=np.int64), 1)
        self._ended = EARLIER_WEIGHT * np.bincount(lengths, minlength=2)
        "[longest + 1] responses that ended at t tokens"
        self._known = float(self._ended.sum())
        self._prior_samples = prior_samples

    def note(self, num_response_tokens: int) -> None:
        """A response ended with so many tokens."""
        length = max(num_response_tokens, 1)
        if length >= len(self._ended):
            self._ended = np.pad(self._ended, (0, 2 * length - len(self._ended)))
        self._ended[length] += 1.0
        self._known += 1.0
        if self._known >= MEMORY_SAMPLES:
            self._ended *= 0.5
            self._known *= 0.5

    def survival(self, limit: int, open_tokens: np.ndarray | None = None) -> Survival:
        """The curve as of now.

        Args:
            limit: no response is longer.
            open_tokens: [n] lengths so far of responses that have not ended.
        """
        ended = np.zeros(limit + 1)
        size = min(len(self._ended), limit + 1)
        ended[:size] = self._ended[:size]
        # longer ones of a time with a higher limit end at this one
        ended[limit] += self._ended[size:].sum()
        at_risk = _reversed_sum(ended)
        if open_tokens is not None and len(open_tokens):
            # one that has l tokens did not end at l: it was at risk up to there
            at_risk += _reversed_sum(np.bincount(np.clip(open_tokens, 0, limit), minlength=limit + 1))
        # survival (scale / (scale + t)) ** PRIOR_TAIL: what remains is in proportion to scale + t
        scale = max(PRIOR_MEDIAN_SHARE * limit / (2.0 ** (1.0 / PRIOR_TAIL) - 1.0), 1.0)
        beyond = scale + np.arange(limit + 1)
        events = ended + self._prior_samples * (1.0 - ((beyond - 1.0) / beyond) ** PRIOR_TAIL)
        trials = at_risk + self._prior_samples
        hazard = np.divide(events, trials, out=np.zeros_like(events), where=trials > 0)
        hazard[0], hazard[limit] = 0.0, 1.0
        return Survival(probability=np.cumprod(1.0 - hazard))


def _reversed_sum(values: np.ndarray) -> np.ndarray:
    """[t] = sum of values[t:]."""
    return np.cumsum(values[::-1])[::-1].astype(np.float64)
