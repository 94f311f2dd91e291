"""The mean of trained heads: by tokens, of all that are whole; a head of another form or not finite is left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhfspec.core.errors import WeightsError
from rlhfspec.engine.drafters.head.head_weights import HeadWeights
from rlhfspec.learning.drafts.head_average import HeadAverage
from tests.helpers.random_heads import random_head
from tests.helpers.tiny_llama import tiny_llama


@pytest.fixture(scope="module")
def head() -> HeadWeights:
    return random_head(tiny_llama(), draft_vocab_size=7)


def moved(head: HeadWeights, by: float) -> dict[str, np.ndarray]:
    return {name: (tensor + by).numpy() for name, tensor in head.trained.items()}


def test_heads_count_by_the_tokens_they_learned_from(head: HeadWeights) -> None:
    average = HeadAverage(head)
    average.add("gen-0", moved(head, 1.0), num_tokens=300)
    average.add("gen-1", moved(head, -3.0), num_tokens=100)
    average.add("gen-2", moved(head, 1e9), num_tokens=0)
    mean = average.result()
    assert mean is not None and average.num_tokens == 400
    for name, tensor in head.trained.items():
        torch.testing.assert_close(mean.tensors[name], tensor, rtol=1e-5, atol=1e-5)
    assert torch.equal(mean.tensors["d2t"], head.tensors["d2t"])


def test_one_head_alone_is_the_mean(head: HeadWeights) -> None:
    average = HeadAverage(head)
    average.add("gen-0", moved(head, 0.5), num_tokens=64)
    mean = average.result()
    assert mean is not None
    for name, array in moved(head, 0.5).items():
        np.testing.assert_array_equal(mean.tensors[name].numpy(), array)


def test_nothing_learned_is_no_head(head: HeadWeights) -> None:
    assert HeadAverage(head).result() is None


@pytest.mark.parametrize("fault", ["infinite", "shape", "name"])
def test_what_is_not_whole_is_left_out_and_the_others_stand(head: HeadWeights, fault: str) -> None:
    average = HeadAverage(head)
    bad = moved(head, 9.0)
    if fault == "infinite":
        # the last one by order: nothing before it may have been counted
        bad["norm.weight"][3] = np.inf
        expected = r"gen-1 trained the draft head to weights that are not finite \(norm\.weight\)"
    elif fault == "shape":
        bad["norm.weight"] = bad["norm.weight"][:-1]
        expected = r"gen-1 trained another draft head .* norm\.weight is \(31,\), expected \(32,\)"
    else:
        bad["other.weight"] = bad.pop("norm.weight")
        expected = r"norm\.weight is None"
    average.add("gen-0", moved(head, 1.0), num_tokens=128)
    with pytest.raises(WeightsError, match=expected):
        average.add("gen-1", bad, num_tokens=128)
    mean = average.result()
    assert mean is not None
    for name, array in moved(head, 1.0).items():
        np.testing.assert_array_equal(mean.tensors[name].numpy(), array)
