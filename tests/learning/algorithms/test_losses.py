"""Losses against numbers made by hand."""

import math

import torch
from pytest import approx, mark

from learning.algorithms.losses import (
    clipped_policy_loss,
    clipped_value_loss,
    kl_estimate,
    token_weights,
)


@mark.parametrize(
    ("ratio", "advantage", "loss", "has_gradient"),
    [
        (1.1, 2.0, -2.2, True),  # inside: -r A
        (1.5, 2.0, -2.4, False),  # good and already likelier: held at -(1 + 0.2) A
        (0.5, 2.0, -1.0, True),  # good but less likely: the minimum is the unclipped one
        (0.5, -2.0, 1.6, False),  # bad and already less likely: held at (1 - 0.2) |A|
        (1.5, -2.0, 3.0, True),  # bad and likelier: the minimum is the unclipped one
    ],
)
def test_the_clipped_surrogate_takes_the_pessimistic_side(ratio, advantage, loss, has_gradient):
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    value = clipped_policy_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), clip_ratio=0.2)
    assert value.item() == approx(loss)
    value.sum().backward()
    assert (logprobs.grad.item() != 0.0) == has_gradient


def test_the_value_loss_takes_the_larger_error():
    # V 2, old 0, R 3, clip 0.5: errors (2-3)^2 = 1 and (0.5-3)^2 = 6.25 -> 3.125
    # V -1, old 0, R 1, clip 0.5: (-2)^2 = 4 and (-0.5-1)^2 = 2.25 -> 2
    loss = clipped_value_loss(
        torch.tensor([2.0, -1.0]), torch.zeros(2), torch.tensor([3.0, 1.0]), clip_value=0.5
    )
    assert loss.tolist() == approx([3.125, 2.0])


def test_kl_estimators_on_one_token():
    # p = 0.5, q = 0.25: d = ln(1/2): k1 = ln 2, k2 = ln(2)^2 / 2, k3 = 1/2 - 1 + ln 2
    p, q = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert kl_estimate(p, q, "k1").item() == approx(math.log(2))
    assert kl_estimate(p, q, "k2").item() == approx(math.log(2) ** 2 / 2)
    assert kl_estimate(p, q, "k3").item() == approx(math.log(2) - 0.5)


@mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator):
    # the exact expectation under p over a vocabulary of three equals KL(p || q)
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = (p * (p.log() - q.log())).sum()
    assert (p * kl_estimate(p.log(), q.log(), estimator)).sum().item() == approx(exact.item())


def test_token_mean_and_sequence_mean_differ_on_unequal_lengths():
    # responses (1, 2, 3) and (10): tokens (1+2+3+10)/4 = 4; sequences (2 + 10)/2 = 6
    losses = torch.tensor([[1.0, 2.0, 3.0], [10.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert (losses * token_weights(mask, "token_mean")).sum().item() == approx(4.0)
    assert (losses * token_weights(mask, "sequence_mean")).sum().item() == approx(6.0)
    for aggregation in ("token_mean", "sequence_mean"):
        assert token_weights(mask, aggregation).sum().item() == approx(1.0)
