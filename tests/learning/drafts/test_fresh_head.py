"""A head that nobody has trained: vocabulary by frequency, weights of the target's own shapes."""

import numpy as np
import pytest
import torch
from tiny_llama import tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel

from rlhfspec.core.errors import ModelError
from rlhfspec.engine.drafters.head.head_weights import require_whole
from rlhfspec.learning.drafts.head import draft_vocabulary, fresh_head

RESPONSES = [np.array([5, 5, 9, 9, 9, 12]), np.array([12, 12, 7])]
PROMPTS = [np.array([3, 3, 5, 4])]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, [1]),
        (3, [1, 9, 12]),
        (4, [1, 5, 9, 12]),
        (6, [1, 3, 5, 7, 9, 12]),
        (8, [0, 1, 3, 4, 5, 7, 9, 12]),
    ],
)
def test_the_vocabulary_is_stop_tokens_then_responses_then_prompts_then_lowest_ids(size: int, expected: list):
    ids = draft_vocabulary(size, 19, responses=RESPONSES, prompts=PROMPTS, always=[1, 99])
    assert ids.tolist() == expected


def test_a_vocabulary_is_no_larger_than_the_targets():
    assert draft_vocabulary(100, 19, responses=RESPONSES).tolist() == list(range(19))


@pytest.mark.parametrize("tied", [False, True])
def test_a_fresh_head_is_whole_and_takes_output_and_norm_from_the_target(tied: bool):
    model = tiny_llama(tie_word_embeddings=tied)
    ids = draft_vocabulary(8, 19, responses=RESPONSES)
    head = fresh_head(model, ids)
    require_whole(head, "made")
    assert head.token_ids.tolist() == ids.tolist()
    assert torch.equal(head.tensors["lm_head.weight"], model.lm_head.weight[ids])
    assert torch.equal(head.tensors["norm.weight"], model.model.norm.weight)
    again = fresh_head(model, ids)
    assert all(torch.equal(again.tensors[name], value) for name, value in head.tensors.items())


def test_a_model_of_another_build_is_refused():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=19))
    with pytest.raises(ModelError, match="no draft head can be made for a GPT2LMHeadModel"):
        fresh_head(model, torch.arange(4))


@pytest.mark.parametrize(
    ("scaling", "kind"),
    [({"rope_type": "linear", "factor": 2.0}, "linear"), ({"rope_type": "dynamic", "factor": 2.0}, None)],
)
def test_rotary_positions_are_the_targets_where_they_do_not_depend_on_the_length(scaling: dict, kind):
    model = tiny_llama(rope_parameters={"rope_theta": 5_000.0, **scaling})
    rope = fresh_head(model, torch.arange(4)).config.rope_parameters
    assert rope["rope_theta"] == 5_000.0 and rope.get("rope_type") == kind
