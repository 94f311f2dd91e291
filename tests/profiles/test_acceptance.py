"""The acceptance model: fits recover what made the data; poor data give a finite, smoothed share."""

import numpy as np
import pytest

from rlhfspec.profiles.acceptance import (
    AcceptanceModel,
    NodeTable,
    first_features,
    fit_acceptance,
    fit_paper_form,
    other_features,
    paper_features,
)

TRUE = AcceptanceModel(first=(0.5, 0.6, 0.2, 0.5, -0.3), other=(0.4, -0.5, 0.3, -0.2, -0.6))


def simulated(count: int, seed: int, model: AcceptanceModel = TRUE) -> NodeTable:
    """Nodes of ranks 1 to 3 whose fate the model decides."""
    random = np.random.default_rng(seed)
    margin, logprob = random.exponential(1.5, count), -random.exponential(1.5, count)
    level, rank = random.integers(1, 9, count), random.integers(1, 4, count)
    chance = model.conditional(margin, logprob, level, rank)
    return NodeTable(
        margin=margin,
        logprob=logprob,
        level=level,
        rank=rank,
        accepted=random.random(count) < chance,
        sample=np.arange(count) % 20,
    )


def constant(nodes: int, accepted: int, *, rank: int = 1) -> NodeTable:
    random = np.random.default_rng(nodes)
    return NodeTable(
        margin=random.random(nodes),
        logprob=-random.random(nodes),
        level=np.ones(nodes, dtype=int),
        rank=np.full(nodes, rank),
        accepted=np.arange(nodes) < accepted,
        sample=np.zeros(nodes, dtype=int),
    )


def test_a_fit_recovers_the_coefficients_that_made_the_data() -> None:
    fitted = fit_acceptance(simulated(60_000, 2))
    np.testing.assert_allclose(fitted.first, TRUE.first, atol=0.15)
    # ranks 2 and 3 alone: intercept and rank have standard errors of 0.06
    np.testing.assert_allclose(fitted.other, TRUE.other, atol=0.18)


def test_a_fit_predicts_unseen_nodes_as_the_truth_does() -> None:
    fitted, unseen = fit_acceptance(simulated(20_000, 1)), simulated(2000, 2)
    arguments = (unseen.margin, unseen.logprob, unseen.level, unseen.rank)
    difference = fitted.conditional(*arguments) - TRUE.conditional(*arguments)
    assert np.abs(difference).max() < 0.05


def test_first_and_other_choices_are_fitted_apart() -> None:
    nodes = simulated(20_000, 3)
    flipped = NodeTable(
        **{name: getattr(nodes, name) for name in nodes.__dataclass_fields__ if name != "accepted"},
        accepted=np.where(nodes.rank == 1, ~nodes.accepted, nodes.accepted),
    )
    one, two = fit_acceptance(nodes), fit_acceptance(flipped)
    assert one.other == two.other
    np.testing.assert_allclose(one.first, -np.asarray(two.first), atol=1e-3)


@pytest.mark.parametrize(("nodes", "accepted"), [(50, 50), (50, 0), (0, 0), (1, 1), (40, 9), (40, 31)])
def test_too_few_of_a_class_give_the_smoothed_share_whatever_the_features(nodes: int, accepted: int) -> None:
    model = fit_acceptance(constant(nodes, accepted))
    share = (accepted + 0.5) / (nodes + 1.0)
    assert model.first == pytest.approx((np.log(share / (1 - share)), 0.0, 0.0, 0.0, 0.0))
    # no other choice was seen at all
    assert model.other == (0.0,) * 5
    estimate = model.conditional(np.array([0.0, 9.0]), np.array([-8.0, 0.0]), np.array([1, 7]), np.ones(2))
    assert estimate == pytest.approx([share, share])


def test_separable_data_give_finite_coefficients_of_the_right_sign() -> None:
    margin = np.linspace(0.0, 4.0, 200)
    nodes = NodeTable(
        margin=margin,
        logprob=np.full(200, -1.0),
        level=np.ones(200, dtype=int),
        rank=np.ones(200, dtype=int),
        accepted=margin > 2.0,
        sample=np.zeros(200, dtype=int),
    )
    model = fit_acceptance(nodes)
    assert np.isfinite(model.first).all()
    ends = model.conditional(np.array([0.1, 3.9]), np.full(2, -1.0), np.ones(2), np.ones(2))
    assert ends[0] < 0.1 and ends[1] > 0.9


def test_conditional_takes_the_regression_of_the_rank_by_hand() -> None:
    model = AcceptanceModel(first=(1.0, 0.0, 2.0, 0.5, 1.0), other=(-1.0, -2.0, 0.5, 1.0, -1.0))
    estimate = model.conditional(
        np.array([1.0, 1.0]), np.array([-2.0, -2.0]), np.array([4, 4]), np.array([1, 2])
    )
    first = 1.0 + 2.0 - 1.0 + np.log(4)
    other = -1.0 - 2.0 - 1.0 + np.log(4) - np.log(2)
    assert estimate == pytest.approx([1 / (1 + np.exp(-first)), 1 / (1 + np.exp(-other))])


def test_features_are_finite_at_margin_zero_and_vanish_at_level_and_rank_one() -> None:
    zero, one = np.zeros(1), np.ones(1)
    assert first_features(zero, zero, one)[0].tolist() == pytest.approx([1, np.log(1e-3), 0, 0, 0])
    assert other_features(zero, zero, one, one)[0].tolist() == [1, 0, 0, 0, 0]
    assert paper_features(np.array([-1.5]))[0].tolist() == [1, -1.5]


def test_the_papers_form_recovers_intercept_and_slope() -> None:
    nodes = simulated(40_000, 4)
    chance = 1 / (1 + np.exp(-(2.0 + 0.7 * nodes.logprob)))
    accepted = np.random.default_rng(5).random(len(nodes)) < chance
    nodes = NodeTable(
        **{name: getattr(nodes, name) for name in nodes.__dataclass_fields__ if name != "accepted"},
        accepted=accepted,
    )
    assert fit_paper_form(nodes) == pytest.approx((2.0, 0.7), abs=0.06)


def test_where_keeps_the_rows_under_the_mask_in_every_column() -> None:
    nodes = simulated(10, 6)
    kept = nodes.where(nodes.rank == 1)
    assert len(kept) == (nodes.rank == 1).sum()
    for name in nodes.__dataclass_fields__:
        assert getattr(kept, name).tolist() == getattr(nodes, name)[nodes.rank == 1].tolist()
