"""Online correction: what a run teaches beyond its profile, as decayed sums and slow factors.

Acceptance: the ratio of accepted to expected tokens over the last decode steps, with a prior of 1. A new weight
version makes the past count less: the old fit is wider. Level by level, the conditional estimates say how far a
draft is worth going before it is drafted. Costs: multiplicative factors of draft and verification, changed slowly.
"""

from __future__ import annotations

import math

import numpy as np

from core.records import DraftLog, StepRecord

PRIOR_TOKENS = 40.0
"Expected tokens that the profile counts for."
DECAY = 0.97
"A decode step's weight, one step later."
WIDEN = 0.25
"What the past still counts after a new weight version."
TRACK_PRIOR_TOKENS = 100.0
TRACK_RANGE = (0.85, 1.15)
"Acceptance and costs have corrections of their own: this one is for the rest."
TRACK_DECAY = 0.99
UNUSED_DECAY = 0.995
"Of the record of a shape, while another is used."
COST_STEP = 0.1
COST_RANGE = (0.4, 2.5)


class AcceptanceRecalibration:
    """Accepted over expected tokens, and conditional acceptance by level."""

    def __init__(self, path: np.ndarray) -> None:
        """Start from the profile's chain: `path[d]` is the mean acceptance of the whole path to level d + 1."""
        before = np.concatenate([[1.0], path[:-1]])
        self._prior = np.clip(path / np.maximum(before, 1e-6), 1e-3, 0.999)
        self._accepted = self._expected = 0.0
        self._reached = np.zeros(len(path))
        self._passed = np.zeros(len(path))

    @property
    def factor(self) -> float:
        """Multiply expected tokens by this."""
        return (self._accepted + PRIOR_TOKENS) / (self._expected + PRIOR_TOKENS)

    @property
    def conditional(self) -> np.ndarray:
        """Estimated acceptance of level d + 1 given level d, by the scores seen."""
        return (self._passed + PRIOR_TOKENS * self._prior) / (self._reached + PRIOR_TOKENS)

    @property
    def path(self) -> np.ndarray:
        """Expected acceptance of the whole path, by level."""
        return np.cumprod(self.conditional)

    def observe(self, draft: DraftLog) -> None:
        """Take one refined draft's outcome."""
        self._accepted = self._accepted * DECAY + float(draft.num_accepted.sum())
        self._expected = self._expected * DECAY + _number(draft.expected_tokens)
        best = _best_of_levels(draft)[: len(self._prior)]
        if not np.isfinite(best).all():
            best = np.nan_to_num(best, posinf=0.0, neginf=0.0)
        self._reached *= DECAY
        self._passed *= DECAY
        self._reached[: len(best)] += np.concatenate([[len(draft.scores)], best[:-1]])[: len(best)]
        self._passed[: len(best)] += best

    def widen(self) -> None:
        """The weights have changed."""
        self._accepted *= WIDEN
        self._expected *= WIDEN
        self._reached *= WIDEN
        self._passed *= WIDEN


def _number(value: float) -> float:
    """A broken drafter's estimates are no numbers: nought."""
    return value if math.isfinite(value) else 0.0


def _best_of_levels(draft: DraftLog) -> np.ndarray:
    """[levels] sum over samples of the best score of each level."""
    if draft.scores.shape[1] == len(draft.level_sizes):
        return draft.scores.sum(axis=0, dtype=np.float64)
    starts = np.cumsum((0, *draft.level_sizes[:-1]))
    return np.maximum.reduceat(draft.scores, starts, axis=1).sum(axis=0, dtype=np.float64)


class CostRecalibration:
    """Slow multiplicative factors on predicted seconds."""

    def __init__(self) -> None:
        self.draft = self.verify = 1.0

    def observe(self, record: StepRecord, *, draft_s: float, verify_s: float) -> None:
        """Compare a decode step with its prediction; outliers count no more than a quarter off."""
        self.verify = _nudged(self.verify, record.verify_s, verify_s)
        if not record.budget.is_plain:
            self.draft = _nudged(self.draft, record.draft_s, draft_s)


def _nudged(factor: float, measured_s: float, predicted_s: float) -> float:
    ratio = measured_s / max(predicted_s, 1e-9)
    step = COST_STEP * float(np.clip(np.log(max(ratio, 1e-9) / factor), -0.25, 0.25))
    return float(np.clip(factor * np.exp(step), *COST_RANGE))


class TrackRecord:
    """What shapes delivered against what was expected of them: tokens over goodput times seconds, decayed sums.

    It settles what the models get wrong about a whole shape: a tree's hidden costs, a chain's early stops.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}

    def factor(self, branching: int) -> float:
        """Multiply a shape's goodput by this: its ratio, within TRACK_RANGE. Plain decoding is branching 0."""
        return min(max(self.ratio(branching), TRACK_RANGE[0]), TRACK_RANGE[1])

    def ratio(self, branching: int) -> float:
        """Delivered over expected; 1 for a shape that has not been tried."""
        delivered, expected = self._sums.get(branching, (0.0, 0.0))
        return (delivered + TRACK_PRIOR_TOKENS) / (expected + TRACK_PRIOR_TOKENS)

    def observe(self, branching: int, *, delivered: float, expected: float) -> None:
        """Add one decode step's tokens; the record of shapes not in use fades, else they were never tried again."""
        for other, (tokens, wanted) in self._sums.items():
            if other != branching:
                self._sums[other] = (tokens * UNUSED_DECAY, wanted * UNUSED_DECAY)
        before = self._sums.get(branching, (0.0, 0.0))
        self._sums[branching] = (before[0] * TRACK_DECAY + delivered, before[1] * TRACK_DECAY + expected)
