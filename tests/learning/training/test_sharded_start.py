"""Sharded trainers start from published weights without a whole model each, and with the same values."""

import numpy as np
import pytest
import torch
from sharded_start import STARTS, start_both_ways
from tiny_llama import tiny_llama
from trainer_group import run_group

from rlhfspec.core.errors import WeightsError
from rlhfspec.engine.weights.chunks import pack_weights, weight_views
from rlhfspec.engine.weights.loading import build_causal_lm
from rlhfspec.learning.training.sharded import copy_of, fill_later, source_of
from rlhfspec.learning.training.training_forward import hold_linears_in

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 8}


def published(dtype=torch.bfloat16):
    model = tiny_llama(tie_word_embeddings=True, **SIZES).to(dtype)
    return pack_weights(model, name="target", weight_version=0)


@pytest.fixture(scope="module")
def started(rollout_maker):
    rollouts = rollout_maker(tiny_llama(), 6)
    results = run_group(2, start_both_ways, rollouts, *published())
    assert not [result for result in results if isinstance(result, BaseException)]
    return results


@pytest.mark.parametrize("case", STARTS)
def test_two_trainers_begin_with_their_parts_alone_and_learn_the_same(started, case) -> None:
    manifest, _ = published()
    whole = 2 * manifest.num_bytes
    for of_rank in started:
        (most_before, _, *weights), (most, held, *others) = of_rank[case, False], of_rank[case, True]
        for one, other in zip(weights, others, strict=True):
            assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True))
        # a second model, where there is one, is divided too; one of eight blocks is whole while it is looked at
        parts = held if case == "adapters" else 2 * held
        assert held < 0.6 * whole and most < parts + 0.5 * whole
        assert most_before > parts + 0.6 * whole or case == "taught", "a model that comes alone"


def test_a_copy_and_held_linears_ask_where_the_values_lie() -> None:
    manifest, chunks = published()
    views = weight_views(manifest, chunks)
    model = build_causal_lm(manifest.hf_config_json, "float32", on_meta=True)
    fill_later(model, views)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.model.rotary_emb.inv_freq.device.type == "cpu"
    copied = copy_of(model)
    for one, other in zip(model.parameters(), copied.parameters(), strict=True):
        assert one is not other and source_of(one) is source_of(other) is not None
    hold_linears_in(copied, torch.bfloat16)
    assert copied.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16

    manifest, chunks = published(torch.float32)
    model = build_causal_lm(manifest.hf_config_json, "float32", on_meta=True)
    fill_later(model, weight_views(manifest, chunks))
    hold_linears_in(model, torch.bfloat16)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32, "it would lose bits"

    odd = dict(weight_views(manifest, chunks))
    del odd["model.norm.weight"]
    with pytest.raises(WeightsError, match=r"1 names differ, first 'model\.norm\.weight'"):
        fill_later(model, odd)
