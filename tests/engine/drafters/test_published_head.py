"""A draft head travels as any published weights do: bit for bit, with its vocabulary, and is known for a head."""

from __future__ import annotations

import pytest
import torch

from rlhfspec.core.errors import ModelError, WeightsError
from rlhfspec.engine.drafters.head.published_head import (
    head_checksum,
    is_head,
    pack_head,
    published_head,
    rounded,
)
from rlhfspec.engine.weights.chunks import pack_weights, weight_views
from tests.helpers.random_heads import random_head
from tests.helpers.tiny_llama import tiny_llama


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_arrives_as_it_was_packed(dtype: torch.dtype) -> None:
    head = random_head(tiny_llama(), draft_vocab_size=11, dtype=dtype)
    manifest, chunks = pack_head(head, weight_version=3)
    got = published_head(manifest, weight_views(manifest, chunks))
    assert is_head(manifest) and manifest.weight_version == 3
    assert got.config == head.config and got.tensors.keys() == head.tensors.keys()
    for name, tensor in head.tensors.items():
        assert got.tensors[name].dtype == tensor.dtype and torch.equal(got.tensors[name], tensor)
    assert head_checksum(got) == manifest.checksum


def test_a_draft_model_is_no_head() -> None:
    manifest, chunks = pack_weights(tiny_llama(), name="draft", weight_version=0)
    assert not is_head(manifest)
    with pytest.raises(WeightsError, match="expected a draft head, got a model of its own"):
        published_head(manifest, weight_views(manifest, chunks))


def test_a_head_that_lacks_a_tensor_is_refused() -> None:
    head = random_head(tiny_llama())
    manifest, chunks = pack_head(head, weight_version=2)
    views = weight_views(manifest, chunks)
    del views["norm.weight"]
    with pytest.raises(ModelError, match=r"version 2 .*norm\.weight"):
        published_head(manifest, views)


def test_a_head_is_rounded_but_its_vocabulary_is_not() -> None:
    head = rounded(random_head(tiny_llama(), draft_vocab_size=5), torch.bfloat16)
    kinds = {name: tensor.dtype for name, tensor in head.tensors.items()}
    assert kinds.pop("d2t") == torch.int64 and kinds.pop("t2d") == torch.bool
    assert set(kinds.values()) == {torch.bfloat16}
