"""A reward model is made of a causal LM by a new head, drawn from the seed, or goes on with the head it has."""

import pytest
import torch
from supervised_items import tiny
from transformers import LlamaForSequenceClassification
from word_chat import word_chat

from rlhfspec.core.errors import ModelError
from rlhfspec.learning.training.reward_head import load_scorer


@pytest.fixture
def causal(tmp_path):
    tiny("sft").save_pretrained(tmp_path / "causal")
    return str(tmp_path / "causal")


def test_a_new_head_is_the_seed_s_and_the_body_the_checkpoint_s(causal):
    (one, is_new), (same, _), (other, _) = (load_scorer(causal, word_chat(), seed=s) for s in (1, 1, 2))
    assert is_new
    assert torch.equal(one.score.weight, same.score.weight)
    assert not torch.equal(one.score.weight, other.score.weight)
    # N(0, 1 / (d + 1)) of 32 values
    assert one.score.weight.std().item() == pytest.approx(33**-0.5, rel=0.5)
    body = tiny("sft").model.state_dict()
    assert all(torch.equal(tensor, body[name]) for name, tensor in one.model.state_dict().items())


def test_global_random_state_stays(causal):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    load_scorer(causal, word_chat(), seed=1)
    assert torch.equal(torch.rand(1), expected)


def test_a_classifier_with_one_output_keeps_its_head(tmp_path):
    scorer = tiny("reward")
    scorer.save_pretrained(tmp_path)
    loaded, is_new = load_scorer(str(tmp_path), word_chat(), seed=1)
    assert not is_new and torch.equal(loaded.score.weight, scorer.score.weight)


def test_the_last_token_is_looked_for_by_the_tokenizer_s_padding(causal):
    tokenizer = word_chat()
    tokenizer.pad_token = None
    model, _ = load_scorer(causal, tokenizer, seed=0)
    assert model.config.pad_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id


def test_a_classifier_with_several_outputs_and_a_damaged_checkpoint_are_refused(tmp_path, causal):
    config = tiny("reward").config
    config.num_labels = 3
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "three")
    with pytest.raises(ModelError, match="a classifier with 3 outputs"):
        load_scorer(str(tmp_path / "three"), word_chat(), seed=0)
    with pytest.raises(ModelError, match="does not exist"):
        load_scorer(str(tmp_path / "none"), word_chat(), seed=0)


@pytest.mark.parametrize(
    ("kind", "head"), [("reward", "classifier"), ("reward", None), ("sft", "v_head.summary")]
)
def test_a_trained_head_of_another_name_is_refused_and_not_drawn_anew(tmp_path, kind, head):
    model = tiny(kind)
    state = {key: tensor for key, tensor in model.state_dict().items() if key != "score.weight"}
    if head is not None:
        state[f"{head}.weight"] = torch.ones(1, 32)
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelError, match=rf"drawn at random.*got {head or 'no other head'}"):
        load_scorer(str(tmp_path), word_chat(), seed=1)
