"""How likely a token that was looked up is the target's: learned while decoding, from what look-ups show.

Two things are known of it: how many tokens before it match the place that it was found at, and how often that place
went on like this. Shares of acceptance by both, each with a prior; the past fades, so that new weights are followed.
"""

from __future__ import annotations

import numpy as np

OF_ITS_OWN_KEY = 0
"In the place of a match: what other weights gave under the same noise."
LENGTHS = np.array([OF_ITS_OWN_KEY, 1, 2, 3, 4, 5, 7, 9, 13, 17, 33])
"Least match of each class."
SHARES = np.array([0.0, 0.5, 0.9])
"Least share of each class."
PRIOR = np.array([0.95, 0.15, 0.25, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7])
PRIOR_TABLE = np.repeat(PRIOR[:, None], len(SHARES), axis=1)
PRIOR_TRIALS = 4.0
MOST_TRIALS = 200.0
"What is older than so many trials of its class fades."


class MatchAcceptance:
    """Of one engine."""

    def __init__(self) -> None:
        self._trials = np.zeros((len(LENGTHS), len(SHARES)))
        self._accepted = np.zeros_like(self._trials)
        self._table = PRIOR_TABLE.astype(np.float32)

    def classes(self, lengths: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """Class of each look-up, one number, of match lengths and shares of one shape."""
        return (np.searchsorted(LENGTHS, lengths, side="right") - 1) * len(SHARES) + (
            np.searchsorted(SHARES, shares, side="right") - 1
        )

    def conditional(self, classes: np.ndarray) -> np.ndarray:
        """Estimated acceptance given that the token before is accepted, float32."""
        return self._table.ravel()[classes]

    def observe(self, classes: np.ndarray, was_accepted: np.ndarray) -> None:
        """Take the outcome of tokens that were verified behind accepted ones; arrays of one length."""
        trials, accepted = self._trials.ravel(), self._accepted.ravel()
        np.add.at(trials, classes, 1.0)
        np.add.at(accepted, classes, was_accepted)
        many = trials > MOST_TRIALS
        accepted[many] *= MOST_TRIALS / trials[many]
        trials[many] = MOST_TRIALS
        self._table = ((self._accepted + PRIOR_TRIALS * PRIOR_TABLE) / (self._trials + PRIOR_TRIALS)).astype(
            np.float32
        )
