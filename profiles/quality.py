"""How good a profile's fits are, on data they have not seen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .acceptance import (
    AcceptanceModel,
    NodeTable,
    fit_acceptance,
    fit_paper_form,
    paper_features,
)
from .cost import CostModel, CostTable
from .recording import DraftRecording, join_nodes

BINS = 10
SELECTED_SCORE = 0.5
"Nodes whose estimated path acceptance reaches this stand for those that a policy selects."


def acceptance_quality(drafts: Sequence[DraftRecording]) -> dict[str, float]:
    """Fit on the prompts of even number, judge on the odd ones."""
    fitted = [draft.where(draft.sample % 2 == 0) for draft in drafts]
    held_out = [draft.where(draft.sample % 2 == 1) for draft in drafts]
    train = join_nodes([draft.nodes() for draft in fitted])
    test = join_nodes([draft.nodes() for draft in held_out])
    model = fit_acceptance(train)
    predicted = predict(model, test)
    intercept_slope = np.asarray(fit_paper_form(train))
    paper = 1.0 / (1.0 + np.exp(-paper_features(test.logprob) @ intercept_slope))
    constant = np.full(len(test), train.accepted.mean())
    scores = np.concatenate([draft.scores(model).ravel() for draft in held_out])
    accepted = np.concatenate([draft.accepted.ravel() for draft in held_out])
    chosen = scores >= SELECTED_SCORE
    return {
        "acceptance_calibration_error": calibration_error(predicted, test.accepted),
        "acceptance_calibration_error_selected": calibration_error(scores[chosen], accepted[chosen]),
        "acceptance_log_loss": log_loss(predicted, test.accepted),
        "acceptance_log_loss_paper_form": log_loss(paper, test.accepted),
        "acceptance_log_loss_constant": log_loss(constant, test.accepted),
        "acceptance_held_out_nodes": float(len(test)),
    }


def cost_quality(model: CostModel, held_out: CostTable) -> dict[str, float]:
    """Relative errors of predicted seconds on a later sweep."""
    metrics = {}
    for phase, predicted, measured in (
        ("verify", model.verify_s(held_out.shape), held_out.verify_s),
        ("draft", model.draft_s(held_out.shape), held_out.draft_s),
        ("rest", model.rest_s(held_out.shape), held_out.rest_s),
    ):
        error = np.abs(predicted / measured - 1.0)
        metrics[f"{phase}_cost_median_rel_error"] = float(np.median(error))
        metrics[f"{phase}_cost_p90_rel_error"] = float(np.quantile(error, 0.9))
    return metrics


def predict(model: AcceptanceModel, nodes: NodeTable) -> np.ndarray:
    """Return estimated conditional acceptance of every node."""
    return model.conditional(nodes.margin, nodes.logprob, nodes.level, nodes.rank)


def calibration_error(predicted: np.ndarray, accepted: np.ndarray, bins: int = BINS) -> float:
    """Mean, over bins of equally many nodes, of |mean prediction - share accepted| (ECE with quantile bins)."""
    return float(np.mean([abs(p - a) for p, a, _ in reliability(predicted, accepted, bins)] or [0.0]))


def reliability(
    predicted: np.ndarray, accepted: np.ndarray, bins: int = BINS
) -> list[tuple[float, float, int]]:
    """Mean prediction, share accepted and number of nodes of bins of equally many nodes."""
    order = np.argsort(predicted, kind="stable")
    return [
        (float(predicted[part].mean()), float(accepted[part].mean()), len(part))
        for part in np.array_split(order, min(bins, max(len(order), 1)))
        if len(part)
    ]


def log_loss(predicted: np.ndarray, accepted: np.ndarray) -> float:
    """Mean negative log-likelihood, in nats; NaN of no node."""
    if not len(predicted):
        return math.nan
    p = np.clip(predicted, 1e-6, 1.0 - 1e-6)
    return float(-np.mean(np.where(accepted, np.log(p), np.log(1.0 - p))))
