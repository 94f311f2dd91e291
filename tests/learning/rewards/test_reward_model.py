"""A reward model scores prompt and response, and does not care who else is in the batch."""

import numpy as np
import torch
from pytest import approx, fixture, raises
from transformers import LlamaConfig, LlamaForSequenceClassification

from core.config import RewardConfig
from core.errors import ModelError
from core.records import Prompt
from learning.pairs.tokenization import character_tokenizer
from learning.rewards.reward_function import build_reward
from learning.tasks.chain_task import ALPHABET


@fixture
def save_model(tmp_path):
    def save(num_labels: int) -> str:
        tokenizer = character_tokenizer(ALPHABET)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_labels=num_labels,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=0.5,
        )
        LlamaForSequenceClassification(config).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        return str(tmp_path)

    return save


def test_scores_follow_the_text_and_not_the_batch(save_model):
    path = save_model(1)
    prompts = [Prompt(prompt_id=i, token_ids=np.array([1]), text="03:c+5=") for i in range(3)]
    responses = ["h;", "h;02:h+5=m;", "#b"]
    together = build_reward(RewardConfig(kind="model", model=path, batch_size=3)).score(prompts, responses)
    alone = build_reward(RewardConfig(kind="model", model=path, batch_size=1)).score(prompts, responses)
    assert [r.value for r in together] == approx([r.value for r in alone], abs=1e-5)
    assert len({round(r.value, 4) for r in together}) == 3


def test_a_model_with_several_outputs_is_refused(save_model):
    with raises(ModelError, match="must have one output"):
        build_reward(RewardConfig(kind="model", model=save_model(2)))
