"""Log-probabilities and entropies by chunks: the values and gradients of the plain formulas."""

import math

import pytest
import torch

from rlhfspec.engine.decoding.logprobs import token_logprobs
from rlhfspec.learning.trainer.training_forward import token_statistics


def plain_entropy(logits, temperature):
    return torch.distributions.Categorical(logits=logits / temperature).entropy()


def test_entropy_of_known_distributions():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, math.log(3.0), -math.inf, -math.inf]])
    _, entropy = token_statistics(logits, torch.zeros(2, dtype=torch.int64), 1.0, entropy=True)
    # uniform over 4: ln 4; (1/4, 3/4): ln 4 - 0.75 ln 3
    assert entropy.tolist() == pytest.approx([math.log(4), math.log(4) - 0.75 * math.log(3)])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shape", [(5, 11), (3000, 500)])
def test_values_are_the_engines_to_the_bit_and_gradients_those_of_autograd(shape, temperature):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(shape, generator=generator) * 3).requires_grad_()
    ids = torch.randint(shape[1], (shape[0],), generator=generator)
    weight = torch.rand(2, shape[0], generator=generator)
    logprobs, entropy = token_statistics(logits, ids, temperature, entropy=True)
    (weight[0] * logprobs + weight[1] * entropy).sum().backward()
    got, logits.grad = logits.grad, None
    expected = token_logprobs(logits, ids, temperature)
    expected_entropy = plain_entropy(logits, temperature)
    (weight[0] * expected + weight[1] * expected_entropy).sum().backward()
    assert torch.equal(logprobs, expected)
    assert torch.allclose(entropy, expected_entropy, atol=1e-5)
    assert torch.allclose(got, logits.grad, atol=1e-5)


def test_a_token_that_cannot_be_sampled_gets_no_gradient():
    logits = torch.tensor([[1.0, 2.0, -math.inf]], requires_grad=True)
    logprobs, entropy = token_statistics(logits, torch.tensor([1]), 1.0, entropy=True)
    (logprobs + entropy).sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[0, 2] == 0.0


def test_bfloat16_logits_give_float32_values_and_bfloat16_gradients():
    logits = torch.randn(4, 9).bfloat16().requires_grad_()
    ids = torch.tensor([0, 3, 5, 8])
    logprobs, entropy = token_statistics(logits, ids, 1.0, entropy=False)
    logprobs.sum().backward()
    assert entropy is None and logprobs.dtype == torch.float32
    assert torch.equal(logprobs, token_logprobs(logits, ids, 1.0))
    assert logits.grad.dtype == torch.bfloat16
