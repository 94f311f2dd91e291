"""Log-probabilities of large vocabularies: no bias, and the same bits in any company."""

import pytest
import torch

from rlhfspec.engine.decoding.logprobs import log_softmax, token_logprobs


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def logits_of(num_rows: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3


@pytest.mark.parametrize("vocab_size", [384, 49_152, 151_936, 262_144])
def test_their_mean_error_does_not_grow_with_the_vocabulary(vocab_size):
    logits = logits_of(48, vocab_size)
    errors = log_softmax(logits).double() - torch.log_softmax(logits.double(), dim=-1)
    # a value of about 16 is rounded to 1e-6; torch's own is 4e-6 and 1e-5 too high at the two largest
    assert errors.mean(dim=1).mean().abs() < 3e-7
    assert errors.abs().max() < 3e-6


@pytest.mark.parametrize("vocab_size", [49_152, 49_157])
def test_a_row_has_the_same_bits_alone_and_beside_others(vocab_size, two_threads):
    logits = logits_of(33, vocab_size)
    together = log_softmax(logits)
    for row in range(33):
        assert torch.equal(log_softmax(logits[row : row + 1])[0], together[row])
    assert torch.equal(log_softmax(logits.T.contiguous().T), together)
    ids = torch.arange(33)
    assert torch.equal(token_logprobs(logits, ids, 1.0), together[ids, ids])


def test_what_is_filtered_out_has_no_share_and_a_row_that_is_not_finite_is_not_hidden():
    rows = torch.tensor([[1.0, -torch.inf, 2.0], [1.0, torch.nan, 2.0], [torch.inf, 1.0, 2.0]])
    kept, nan, infinite = log_softmax(rows)
    assert kept.exp().sum() == pytest.approx(1.0) and kept[1] == -torch.inf
    assert nan.isnan().all() and not infinite.isfinite().any()
