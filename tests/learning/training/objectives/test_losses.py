"""Losses against numbers made by hand."""

import math

import torch
from pytest import approx, mark

from rlhfspec.learning.training.objectives.losses import (
    Sequences,
    cispo_loss,
    clipped_policy_loss,
    clipped_value_loss,
    geometric_mean_loss,
    kl_estimate,
    log_ratio,
    token_weights,
)


@mark.parametrize(
    ("ratio", "advantage", "loss", "has_gradient", "clipped"),
    [
        (1.1, 2.0, -2.2, True, None),  # inside: -r A
        (1.5, 2.0, -2.4, False, "high"),  # good and already likelier: held at -(1 + 0.2) A
        (0.5, 2.0, -1.0, True, None),  # good but less likely: the minimum is the unclipped one
        (0.5, -2.0, 1.6, False, "low"),  # bad and already less likely: held at (1 - 0.2) |A|
        (1.5, -2.0, 3.0, True, None),  # bad and likelier: the minimum is the unclipped one
    ],
)
def test_the_clipped_surrogate_takes_the_pessimistic_side(ratio, advantage, loss, has_gradient, clipped):
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    found = clipped_policy_loss(logprobs, torch.tensor([advantage]), clip_low=0.2, clip_high=0.2)
    assert found.loss.item() == approx(loss)
    found.loss.sum().backward()
    assert (logprobs.grad.item() != 0.0) == has_gradient
    assert (bool(found.clipped_low), bool(found.clipped_high)) == (clipped == "low", clipped == "high")


def test_the_upper_bound_may_be_higher_and_a_negative_advantage_be_bounded():
    # DAPO: ratio 1.25 is within 1 + 0.28; dual clip 2: a bad token of ratio 5 costs 2 |A|, not 5 |A|
    one = torch.tensor([math.log(1.25), math.log(5.0)])
    advantages = torch.tensor([1.0, -1.0])
    loss = clipped_policy_loss(one, advantages, clip_low=0.2, clip_high=0.28, dual_clip=2.0).loss
    assert loss.tolist() == approx([-1.25, 2.0])


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    # ratio 8, bound 1 + 4: weight 5, constant; the gradient of -5 A log pi is -5 A
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss = cispo_loss(
        torch.tensor([math.log(8.0)]), logprobs, torch.tensor([2.0]), clip_low=1.0, clip_high=4.0
    ).loss
    assert loss.item() == approx(10.0)
    loss.sum().backward()
    assert logprobs.grad.item() == approx(-10.0)


def test_a_response_s_ratio_is_the_geometric_mean_of_its_clipped_ones():
    # a good response of log-ratios 0.1, 0.9 (held at 0.4) and -0.8 (free): mean -0.1; a bad one of -0.9 (held), 0.5
    ratios = torch.tensor([0.1, 0.9, -0.8, -0.9, 0.5], requires_grad=True)
    advantages = torch.tensor([2.0, 2.0, 2.0, -1.0, -1.0])
    sequences = Sequences.of(torch.tensor([[True, True, True], [True, True, False]]))
    found = geometric_mean_loss(ratios, advantages, sequences, clip_low=0.4, clip_high=0.4)
    good, bad = math.exp(-0.1), math.exp(0.05)
    assert found.loss.tolist() == approx([-2 * good] * 3 + [bad] * 2)
    (found.loss * torch.tensor([1 / 6] * 3 + [1 / 4] * 2)).sum().backward()
    assert ratios.grad.tolist() == approx([-good / 3, 0.0, -good / 3, 0.0, bad / 4])
    assert found.clipped_high.tolist() == [False, True, False, False, False]
    assert found.clipped_low.tolist() == [False, False, False, True, False]


def test_ratios_of_whole_responses():
    # responses of log-ratios (0.1, 0.3) and (-0.2): products 0.4, -0.2; geometric means 0.2, -0.2
    mask = torch.tensor([[True, True], [True, False]])
    new, old = torch.tensor([-0.9, -0.7, -1.2]), torch.full((3,), -1.0)
    sequences = Sequences.of(mask)
    assert log_ratio(new, old, "token").tolist() == approx([0.1, 0.3, -0.2], abs=1e-6)
    assert log_ratio(new, old, "sequence", sequences).tolist() == approx([0.4, 0.4, -0.2], abs=1e-6)
    assert log_ratio(new, old, "sequence_mean", sequences).tolist() == approx([0.2, 0.2, -0.2], abs=1e-6)


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


def exact_gradients(estimator):
    """Of KL(p || q), KL(q || p) and of the estimator's expectation, by enumeration over four tokens."""
    logits = torch.tensor([0.5, -0.2, 0.1, 1.0], requires_grad=True)
    other = torch.log_softmax(torch.tensor([0.1, 0.4, -0.5, 0.2]), dim=0)

    def gradient(of):
        p = torch.log_softmax(logits, dim=0)
        return torch.autograd.grad(of(p), logits)[0]

    forward = gradient(lambda p: (p.exp() * (p - other)).sum())
    reverse = gradient(lambda p: (other.exp() * (other - p)).sum())
    # tokens are sampled, so their probabilities are constants
    estimated = gradient(lambda p: (p.exp().detach() * kl_estimate(p, other, estimator)).sum())
    return forward, reverse, estimated


@mark.parametrize("estimator", ["k2", "k1+", "k3+"])
def test_the_gradient_is_that_of_the_divergence(estimator):
    divergence, _, estimated = exact_gradients(estimator)
    assert torch.allclose(estimated, divergence, atol=1e-6)


def test_k1_has_no_gradient_and_k3_that_of_the_other_divergence():
    # why k1 in the loss is refused, and what k3 is
    assert torch.allclose(exact_gradients("k1")[2], torch.zeros(4), atol=1e-6)
    _, other_divergence, estimated = exact_gradients("k3")
    assert torch.allclose(estimated, other_divergence, atol=1e-6)


@mark.parametrize("estimator", ["k1", "k3"])
def test_a_plus_changes_the_gradient_and_not_the_value(estimator):
    p, q = torch.tensor([-1.0, -0.2]), torch.tensor([-0.5, -3.0])
    assert torch.allclose(kl_estimate(p, q, estimator + "+"), kl_estimate(p, q, estimator))


def test_a_token_that_ran_away_does_not_overflow():
    p, q = torch.tensor([-200.0], requires_grad=True), torch.tensor([-0.1])
    kl = kl_estimate(p, q, "k3")
    assert kl.item() == approx(10.0)
    ratio = log_ratio(torch.tensor([0.0]), torch.tensor([-200.0]), "token")
    assert math.isfinite(ratio.exp().item())


def test_token_mean_and_sequence_mean_differ_on_unequal_lengths():
    # responses (1, 2, 3) and (10): tokens (1+2+3+10)/4 = 4; sequences (2 + 10)/2 = 6
    losses = torch.tensor([[1.0, 2.0, 3.0], [10.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert (losses * token_weights(mask, "token_mean")).sum().item() == approx(4.0)
    assert (losses * token_weights(mask, "sequence_mean")).sum().item() == approx(6.0)
    for aggregation in ("token_mean", "sequence_mean"):
        assert token_weights(mask, aggregation).sum().item() == approx(1.0)


def test_a_constant_length_counts_every_token_of_every_response_alike():
    # sums 6 and 10 over two responses of at most 8 tokens: (6 + 10) / (2 * 8)
    losses = torch.tensor([[1.0, 2.0, 3.0], [10.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert (losses * token_weights(mask, "constant_length", max_tokens=8)).sum().item() == approx(1.0)
