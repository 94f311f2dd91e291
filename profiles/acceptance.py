"""The acceptance model: how likely is a drafted child the target's token, given that its parent is accepted?

Logistic regression (statsmodels GLM, binomial) on what the draft model shows: by how much the child's perturbed
score leads (the first) or trails (the others) its best sibling, its log-probability, its level. The paper fits
acceptance on the draft logit alone (RLHFSpec, arXiv 2512.04752, section 4); `fit_paper_form` keeps that as a
baseline. Fitting needs statsmodels and is imported only where a profile is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

MARGIN_FLOOR = 1e-3
"Added to a margin before its logarithm."
LARGEST_EXPONENT = 80.0
"exp of more overflows float32."


class Coefficients(NamedTuple):
    """Of children side by side: arrays of one shape."""

    intercept: np.ndarray
    log_margin: np.ndarray
    margin: np.ndarray
    logprob: np.ndarray


def acceptance(margin: np.ndarray, logprob: np.ndarray, by: Coefficients) -> np.ndarray:
    """Return the logistic function of what children show, in the type of their arrays, times `by`; NaN stays NaN."""
    logit = by.log_margin * np.log(margin + MARGIN_FLOOR)
    logit += by.margin * margin
    logit += by.logprob * logprob
    logit += by.intercept
    return 1.0 / (1.0 + np.exp(np.minimum(-logit, LARGEST_EXPONENT)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceModel:
    """Coefficients of two logistic regressions; equal for every sample."""

    first: tuple[float, ...]
    "rank 1: intercept, log margin, margin, log-probability, log level"
    other: tuple[float, ...]
    "rank 2 and on: intercept, margin, log-probability, log level, log rank"

    def conditional(
        self, margin: np.ndarray, logprob: np.ndarray, level: np.ndarray, rank: np.ndarray
    ) -> np.ndarray:
        """Return the estimated acceptance of children whose parents are accepted.

        Args:
            margin: perturbed score of rank 1 minus that of the best sibling: of itself for other ranks; not negative.
            logprob: the draft model's log-probability of the child at the sample's temperature.
            level: 1 for children of the root.
            rank: 1 for the drafter's first choice.
        """
        return acceptance(margin, logprob, self.coefficients(level, rank))

    def coefficients(self, level: np.ndarray, rank: np.ndarray) -> Coefficients:
        """Return what `acceptance` scores children of these levels and ranks by."""
        (one, one_log, one_margin, one_logprob, one_level) = self.first
        (more, more_margin, more_logprob, more_level, more_rank) = self.other
        is_first, depth = rank == 1, np.log(level)
        return Coefficients(
            intercept=np.where(
                is_first, one + one_level * depth, more + more_level * depth + more_rank * np.log(rank)
            ),
            log_margin=np.where(is_first, one_log, 0.0),
            margin=np.where(is_first, one_margin, more_margin),
            logprob=np.where(is_first, one_logprob, more_logprob),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTable:
    """Drafted children whose parents were accepted: features and what became of them. Arrays of one length."""

    margin: np.ndarray
    logprob: np.ndarray
    level: np.ndarray
    rank: np.ndarray
    accepted: np.ndarray
    "bool"
    sample: np.ndarray
    "which prompt: held-out data are other prompts"

    def __len__(self) -> int:
        return len(self.accepted)

    def where(self, mask: np.ndarray) -> NodeTable:
        """Return the rows under the mask."""
        return NodeTable(**{name: getattr(self, name)[mask] for name in self.__dataclass_fields__})


def fit_acceptance(nodes: NodeTable) -> AcceptanceModel:
    """Fit both regressions; where a class is missing or alone, the answer is its smoothed share."""
    is_first = nodes.rank == 1
    one, more = nodes.where(is_first), nodes.where(~is_first)
    return AcceptanceModel(
        first=_fit(first_features(one.margin, one.logprob, one.level), one.accepted),
        other=_fit(other_features(more.margin, more.logprob, more.level, more.rank), more.accepted),
    )


def fit_paper_form(nodes: NodeTable) -> tuple[float, ...]:
    """Fit acceptance on the draft's log-probability alone: intercept and slope."""
    return _fit(paper_features(nodes.logprob), nodes.accepted)


def first_features(margin: np.ndarray, logprob: np.ndarray, level: np.ndarray) -> np.ndarray:
    """Features of first choices, [M, 5]."""
    return np.stack(
        [np.ones_like(margin), np.log(margin + MARGIN_FLOOR), margin, logprob, np.log(level)], axis=-1
    )


def other_features(
    margin: np.ndarray, logprob: np.ndarray, level: np.ndarray, rank: np.ndarray
) -> np.ndarray:
    """Features of the other choices, [M, 5]."""
    return np.stack([np.ones_like(margin), margin, logprob, np.log(level), np.log(rank)], axis=-1)


def paper_features(logprob: np.ndarray) -> np.ndarray:
    """Features of the paper's form, [M, 2]."""
    return np.stack([np.ones_like(logprob), logprob], axis=-1)


def _fit(features: np.ndarray, accepted: np.ndarray) -> tuple[float, ...]:
    import statsmodels.api as sm

    share = (accepted.sum() + 0.5) / (len(accepted) + 1.0)
    constant = (float(np.log(share / (1.0 - share))), *[0.0] * (features.shape[1] - 1))
    if min(accepted.sum(), len(accepted) - accepted.sum()) < 2 * features.shape[1]:
        return constant
    # a little ridge: separable data would send a coefficient to infinity
    model = sm.GLM(accepted.astype(float), features, family=sm.families.Binomial())
    penalty: Any = np.full(features.shape[1], 1.0 / len(accepted))
    penalty[0] = 0.0
    result = model.fit_regularized(alpha=penalty, L1_wt=0.0, start_params=np.asarray(constant))
    return tuple(float(value) for value in result.params)
