"""Online correction: what a run teaches beyond its profile, as decayed sums and slow factors.

Acceptance: a draft's levels are passed one after the other until one is rejected, which is a life at a hazard. With
estimates c the hazard of a level is -log c, and a run that rejects `hazard_ratio` times as often as estimated makes
of every path score s its power s ** hazard_ratio (proportional hazards, Cox 1972). So later levels fail more than the
first where all are worse than thought: one factor on all of them would take too much from the first and too little
from the last. A new weight version makes the past count less. Costs: multiplicative factors, changed slowly.

Track record: the tokens and seconds of whole shapes over those expected settle what the models get wrong about a shape:
a tree's hidden costs, a chain's early stops, what one node for every sample takes here. Most of what they get wrong at
a batch size they get wrong for every shape, so that one not tried there is believed to share three quarters of it: else
whatever has not been tried looked best wherever drafts deliver less than expected. Plain decoding stands for itself,
and has the benefit of the doubt where little is known of it: a model that is wrong by a few percent must not keep it
from being tried. New versions leave the record as it is: seconds depend on no weights, tokens are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...core.decode_records import DraftLog, StepRecord

PRIOR_DRAFTS = 40.0
"Drafts that the profile's conditional acceptance counts for."
PRIOR_REJECTIONS = 3.0
"With so many rejections, or so many expected, half of the logarithm of their ratio is believed."
FEWEST_REJECTIONS = 0.1
"Added to both: none is not never."
MEMORY_REJECTIONS, MOST_ROWS = 60.0, 64
"After so many more a rejection counts for a third; so of a batch no more than so many rows are looked at."
HAZARD_RANGE = (0.2, 20.0)
LEAST_HAZARD = 1e-4
"Of a level: no estimate is surer than this."
LEAST_SCORE = 1e-6
LARGEST_EXPONENT = 500.0
DECAY = 0.97
"A decode step's weight, one step later."
WIDEN = 0.25
"What the past still counts after a new weight version."
COST_STEP = 0.1
COST_RANGE = (0.4, 2.5)


class AcceptanceRecalibration:
    """The hazard ratio of this run, and conditional acceptance by level."""

    def __init__(self, path: np.ndarray) -> None:
        """Start from the profile's chain: `path[d]` is the mean acceptance of the whole path to level d + 1."""
        before = np.concatenate([[1.0], path[:-1]])
        self._prior = np.clip(path / np.maximum(before, 1e-6), 1e-3, 0.999)
        self._rejections = self._exposure = 0.0
        self._reached = np.zeros(len(path))
        self._passed = np.zeros(len(path))
        self.hazard_ratio = 1.0
        "rejections over those expected: path scores to this power are what this run accepts"

    @property
    def conditional(self) -> np.ndarray:
        """Acceptance of level d + 1 given level d: by the scores seen, at this run's hazard."""
        passed = self._passed + PRIOR_DRAFTS * self._prior
        return (passed / (self._reached + PRIOR_DRAFTS)) ** self.hazard_ratio

    @property
    def path(self) -> np.ndarray:
        """Expected acceptance of the whole path, by level."""
        return np.cumprod(self.conditional)

    def corrected(self, scores: np.ndarray) -> np.ndarray:
        """Path scores at this run's hazard."""
        return scores if self.hazard_ratio == 1.0 else scores**self.hazard_ratio

    def observe(self, draft: DraftLog) -> None:
        """Take one refined draft's outcome."""
        scores = draft.scores
        if not np.isfinite(scores.sum()):
            # a broken drafter's estimates are no numbers: sure of nothing
            scores = np.nan_to_num(scores, posinf=0.0, neginf=0.0)
        self._observe_levels(_by_level(scores, draft.level_sizes, np.maximum))
        self._observe_hazard(scores, draft)

    def widen(self, share: float = WIDEN) -> None:
        """The weights have changed, or the samples: the past counts less."""
        self._rejections *= share
        self._exposure *= share
        self._reached *= share
        self._passed *= share
        self._set_hazard_ratio()

    def _observe_levels(self, best: np.ndarray) -> None:
        """What the best candidates promise, level by level."""
        passed = best.sum(axis=0, dtype=np.float64)[: len(self._prior)]
        count = len(passed)
        self._reached *= DECAY
        self._passed *= DECAY
        self._reached[0] += len(best)
        self._reached[1:count] += passed[:-1]
        self._passed[:count] += passed

    def _observe_hazard(self, scores: np.ndarray, draft: DraftLog) -> None:
        """Count rejections, and the hazard to which they and the levels passed were exposed.

        Where in its level a rejection came is unknown: its expectation at the present ratio g is taken, 1/g - h /
        (e^(gh) - 1) of the level's h, so that the ratio tends to the likeliest one (Dempster, Laird and Rubin 1977).
        """
        rows = slice(None, None, -(-len(scores) // MOST_ROWS))
        levels, verified = _levels(scores[rows], draft.num_nodes[rows], draft.level_sizes)
        ratio, exposure, rejections = self.hazard_ratio, 0.0, 0
        # row by row: for the few samples that are in a hurry arrays cost more than numbers
        lives = zip(levels.tolist(), verified.tolist(), draft.num_accepted[rows].tolist(), strict=True)
        for path, count, accepted in lives:
            # behind a sample's limit nothing is expected, whatever is accepted
            while count and path[count - 1] <= 0.0:
                count -= 1
            accepted = min(accepted, count)
            before = _hazard(path[accepted - 1]) if accepted else 0.0
            exposure += before
            if accepted < count:
                width = max(_hazard(path[accepted]) - before, LEAST_HAZARD)
                exposure += 1.0 / ratio - width / math.expm1(min(ratio * width, LARGEST_EXPONENT))
                rejections += 1
        # rejections are the evidence: where they are rare the past is remembered for longer
        fade = math.exp(-rejections / MEMORY_REJECTIONS)
        self._exposure = self._exposure * fade + exposure
        self._rejections = self._rejections * fade + rejections
        self._set_hazard_ratio()

    def _set_hazard_ratio(self) -> None:
        evidence = max(self._rejections, self._exposure)
        believed = evidence / (evidence + PRIOR_REJECTIONS)
        ratio = (self._rejections + FEWEST_REJECTIONS) / (self._exposure + FEWEST_REJECTIONS)
        self.hazard_ratio = min(max(ratio**believed, HAZARD_RANGE[0]), HAZARD_RANGE[1])


def _levels(scores: np.ndarray, verified: np.ndarray, sizes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Estimated acceptance of the way to each level, [B, levels], and the number of levels verified, [B]."""
    if scores.shape[1] == len(sizes):
        return scores, verified
    # of a tree a level is passed where any of its verified candidates is
    place = np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1)
    levels = _by_level(np.where(place < verified[:, None], scores, 0.0), sizes, np.add)
    return levels, np.count_nonzero(levels, axis=1)


def _hazard(score: float) -> float:
    return -math.log(min(max(score, LEAST_SCORE), 1.0))


def _by_level(scores: np.ndarray, level_sizes: tuple[int, ...], of: np.ufunc) -> np.ndarray:
    """[B, levels] of all candidates' scores [B, C]; of a chain they are the scores."""
    if scores.shape[1] == len(level_sizes):
        return scores
    return of.reduceat(scores, np.cumsum((0, *level_sizes[:-1])), axis=1)


class CostRecalibration:
    """Slow multiplicative factors on predicted seconds."""

    def __init__(self) -> None:
        self.draft = self.verify = 1.0

    def observe(self, record: StepRecord, *, draft_s: float, verify_s: float) -> None:
        """Compare a decode step with its prediction; outliers count no more than a quarter off.

        `draft_s` is not looked at where nothing was drafted.
        """
        self.verify = _nudged(self.verify, record.verify_s, verify_s)
        if not record.budget.is_plain:
            self.draft = _nudged(self.draft, record.draft_s, draft_s)


def _nudged(factor: float, measured_s: float, predicted_s: float) -> float:
    ratio = measured_s / max(predicted_s, 1e-9)
    step = COST_STEP * min(max(math.log(max(ratio, 1e-9) / factor), -0.25), 0.25)
    return min(max(factor * math.exp(step), COST_RANGE[0]), COST_RANGE[1])


RANGE = (0.85, 1.15)
"Of tokens: acceptance has a correction of its own, and what it takes off must not be taken off again."
SLOWEST = 2.5
"A decode step's seconds over those expected count for no more, and for no less than its inverse."
PRIOR_STEPS = 10.0
"Decode steps that what is believed of an untried shape counts for."
USED_DECAY = 0.99
UNUSED_DECAY = 0.998
"Of the record of a shape, while another is used on batches of this size: other processes may have slowed it."
COMMON = 0.75
"Of the logarithm of a ratio over drafts that have been tried."
DOUBT = 0.1
"What plain decoding is overrated by where it has not been tried."


_UNTRIED = (0.0, 0.0, 0.0)
"Sums over the decode steps of a shape: 1 for each, its tokens and its seconds over those expected."


def _ratios(sums: Sequence[float], untried: Sequence[float] = (1.0, 1.0)) -> list[float]:
    known = sums[0] + PRIOR_STEPS
    return [(seen + PRIOR_STEPS * guess) / known for seen, guess in zip(sums[1:], untried, strict=True)]


class TrackRecord:
    """Tokens and seconds over those expected, by batch size (in powers of two) and branching; decayed sums."""

    def __init__(self, *, doubt: float = DOUBT) -> None:
        """Begin with nothing known; `doubt` is what plain decoding is overrated by then."""
        self._doubt = doubt
        self._sums: dict[int, dict[int, list[float]]] = {}

    def factor(self, branching: int, num_samples: int) -> float:
        """Multiply a shape's goodput by this: tokens, within RANGE, over seconds. Plain decoding is branching 0."""
        tokens, seconds = self.ratios(branching, num_samples)
        factor = min(max(tokens, RANGE[0]), RANGE[1]) / seconds
        if branching:
            return factor
        known = self._of(num_samples).get(0, _UNTRIED)[0]
        return factor * (1.0 + self._doubt * PRIOR_STEPS / (PRIOR_STEPS + known))

    def ratios(self, branching: int, num_samples: int) -> list[float]:
        """Tokens and seconds over those expected, believed the more the longer they are known."""
        of, untried = self._of(num_samples), [1.0, 1.0]
        if branching:
            drafts = [sums for other, sums in of.items() if other]
            together = [sum(seen) for seen in zip(_UNTRIED, *drafts, strict=True)]
            untried = [ratio**COMMON for ratio in _ratios(together)]
        return _ratios(of.get(branching, _UNTRIED), untried)

    def observe(
        self, branching: int, num_samples: int, *, tokens: float, seconds: float, num_steps: int = 1
    ) -> None:
        """Add a decode step; the record of shapes not in use fades, else they were never tried again.

        Args:
            branching: of the shape.
            num_samples: of the batch.
            tokens: of the step, in those that one step of the shape yields by the models.
            seconds: likewise.
            num_steps: that it stands for.
        """
        of = self._sums.setdefault(num_samples.bit_length(), {})
        for other, sums in of.items():
            fade = (USED_DECAY if other == branching else UNUSED_DECAY) ** num_steps
            of[other] = [fade * seen for seen in sums]
        step, sums = (1.0, tokens, min(max(seconds, 1.0 / SLOWEST), SLOWEST)), of.get(branching, _UNTRIED)
        of[branching] = [seen + num_steps * one for seen, one in zip(sums, step, strict=True)]

    def _of(self, num_samples: int) -> dict[int, list[float]]:
        return self._sums.get(num_samples.bit_length(), {})
